"""The definition of `attention_step`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from residua.ops.cached_attend.reference import cached_attend


def attention_step(
    lanes: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    before: int,
) -> Tensor:
    """Projections, the token into the cache and attention over it, and the projection of that."""
    *made, out = weights
    q, k, v = (F.linear(x, one) for x, one in zip(lanes if len(lanes) > 1 else lanes * 3, made, strict=True))
    return F.linear(cached_attend(q, k, v, rotation, keys, values, before), out)
