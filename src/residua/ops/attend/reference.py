"""The definition of `attend`: float32 accumulation, one stack, no tricks."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm import accumulator
from residua.ops.rms_norm.reference import rms_norm


def logits(query: Tensor, sources: tuple[Tensor, ...], *, eps: float, null: Tensor | None, heads: int) -> Tensor:
    """(The null and) query . rms_norm(source), as [n b t heads]."""
    values = torch.stack(sources).to(accumulator(sources[0].dtype))
    keys = rms_norm(values, eps)
    found = (keys * query.to(keys.dtype)).unflatten(-1, (heads, -1)).sum(-1)
    return found if null is None else torch.cat([null.to(found.dtype).expand_as(found[:1]), found])


def weights(
    query: Tensor,
    sources: tuple[Tensor, ...],
    *,
    eps: float,
    null: Tensor | None,
    heads: int,
    total: bool,
    centered: bool,
) -> Tensor:
    """softmax over the sources (and the null) of query . rms_norm(source), as [n b t heads]."""
    routed = logits(query, sources, eps=eps, null=null, heads=heads).softmax(0)
    if null is not None:
        routed = routed[1:]
    if total:
        routed = routed * len(sources)
    if centered:
        routed = routed - 1 / len(sources)
    return routed


def attend(query: Tensor, sources: tuple[Tensor, ...], *, onto: Tensor | None = None, **options: object) -> Tensor:
    """The sources under their weights, and what they are added to."""
    routed = weights(query, sources, **options)  # type: ignore[arg-type]
    values = torch.stack(sources).to(routed.dtype)
    mixed = (routed.unsqueeze(-1) * values.unflatten(-1, (routed.shape[-1], -1))).sum(0)
    return added(onto, mixed.flatten(-2).to(sources[0].dtype))


def added(onto: Tensor | None, read: Tensor) -> Tensor:
    """onto + read, where there is something to add to."""
    return read if onto is None else onto + read
