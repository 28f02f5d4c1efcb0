"""The definition of `token_attend`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from residua.native.guard import forward_mode
from residua.ops.window_attend.position import rotate


def token_attend(
    q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None = None, *, width: int, causal: bool = True
) -> Tensor:
    """PyTorch's attention, head by head; `products` for what that has no rule for on CPU: tangents and transforms."""
    if forward_mode() or torch._C._are_functorch_transforms_active():
        return products(q, k, v, rotation, width=width, causal=causal)
    q, k, v = _heads(q, k, v, rotation, width)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


def products(
    q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None = None, *, width: int, causal: bool = True
) -> Tensor:
    """The same as two products and a softmax, with derivatives of any order."""
    q, k, v = _heads(q, k, v, rotation, width)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    logits = q @ k.transpose(-1, -2) * width**-0.5
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return (F.softmax(logits, -1) @ v).transpose(1, 2).flatten(-2)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As [b head t e], turned."""
    q, k, v = (each.unflatten(-1, (-1, width)).transpose(1, 2) for each in (q, k, v))
    return (q, k, v) if rotation is None else (rotate(q, *rotation), rotate(k, *rotation), v)
