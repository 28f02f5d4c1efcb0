"""`attention_step` in C: four matrices and a cache, each read once."""

from __future__ import annotations

from torch import Tensor

from residua.native.guard import bare, dense
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.cached_attend import cached_attend
from residua.ops.cached_attend.native import one_turn
from residua.ops.norm import accumulator
from residua.ops.project import project
from residua.ops.project.native import few


@kernel("attention_step", "cpu", "cpu")
def attention_step(
    lanes: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    before: int,
) -> Tensor:
    """The kernel, where numbers alone are wanted; else its parts, which have kernels of their own."""
    x, of_q, of_k, of_v, out = lanes[0], *weights
    rows, shared, room, width = keys.shape
    queries, channels = of_q.shape
    held, outputs = shared * width, out.shape[0]
    fit = (
        few(x)
        and bare(*lanes, *weights, keys, values)
        and all(one.shape == (rows, 1, channels) for one in lanes)
        and of_k.shape == of_v.shape == (held, channels)
        and out.shape[1:] == (queries,)
        and values.shape == keys.shape
        and held > 0 == queries % held
        and 0 <= before < room
        and one_turn(rotation, width)
    )
    q, k, v = lanes if len(lanes) > 1 else lanes * 3
    if not fit:
        made = project(q, of_q), project(k, of_k), project(v, of_v)
        return project(cached_attend(*made, rotation, keys, values, before), out)
    turns: tuple[Tensor | None, ...] = (None, None)
    if rotation is not None:
        wide = accumulator(x.dtype)
        turns = tuple([dense(one, wide) for one in rotation])
    y = x.new_empty((rows, 1, outputs))
    numbers = queries * (channels + outputs) + 2 * held * (channels + rows * (before + 1))
    sizes = rows, before, room, queries // width, shared, width, channels, outputs
    call("residua_attention_step", x.dtype, numbers, (q, k, v, *weights, *turns, keys, values, y), sizes)
    return y
