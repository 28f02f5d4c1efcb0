"""`cached_attend` in C: one call turns q and k, puts k and v into the cache, and reads it once."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.native.guard import bare, dense
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.cached_attend import reference
from residua.ops.norm import accumulator


def one_turn(rotation: tuple[Tensor, Tensor] | None, width: int) -> bool:
    """Whether one rotation serves all rows, as the kernel takes it for granted."""
    return rotation is None or all(2 * one.shape[-1] == width == 2 * one.numel() for one in rotation)


@kernel("cached_attend", "cpu", "cpu")
def cached_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    before: int,
) -> Tensor:
    """The kernel, where numbers alone are wanted, for a cache of the tensors' own type that lies in order."""
    rows, shared, room, width = keys.shape
    if not bare(q, k, v, keys, values) or not one_turn(rotation, width):
        return reference.cached_attend(q, k, v, rotation, keys, values, before)
    turns: tuple[Tensor | None, ...] = (None, None)
    if rotation is not None:
        wide = accumulator(q.dtype)
        turns = tuple([dense(one, wide) for one in rotation])
    out, size = torch.empty_like(q), q.shape[2]
    sizes = rows, before, room, size // width, shared, width
    call("residua_cached_attend", q.dtype, size * rows * (before + 1), (q, k, v, *turns, keys, values, out), sizes)
    return out
