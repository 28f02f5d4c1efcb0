"""The definition of `attend_qkv`."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm import accumulator


def weights(query: Tensor, keys: tuple[Tensor, ...], *, heads: int) -> Tensor:
    """softmax over the sources, as [n b t heads]."""
    wide = accumulator(query.dtype)
    stacked = torch.stack(keys).to(wide).unflatten(-1, (heads, -1))
    logits = (stacked * query.to(wide).unflatten(-1, (heads, -1))).sum(-1)
    return (logits * stacked.shape[-1] ** -0.5).softmax(0)


def attend(query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], *, heads: int) -> Tensor:
    """The values under their weights."""
    routed = weights(query, keys, heads=heads)
    stacked = torch.stack(values).to(routed.dtype).unflatten(-1, (heads, -1))
    return (routed.unsqueeze(-1) * stacked).sum(0).flatten(-2).to(query.dtype)
