"""The definition of `cached_attend`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from residua.ops.window_attend.position import rotate


def cached_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    before: int,
) -> Tensor:
    """The token into the cache, and PyTorch's attention over what is there then."""
    q, k, v = (each.unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2) for each in (q, k, v))
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    after = before + 1
    keys[:, :, before:after], values[:, :, before:after] = k, v
    mixed = F.scaled_dot_product_attention(q, keys[:, :, :after], values[:, :, :after], enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)
