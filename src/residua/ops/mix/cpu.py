"""`mix` by a kernel in C: only references to its inputs are kept between forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.native.guard import Kernel, Unsupported, only_torch, require
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.mix import linear, native, reference
from residua.ops.norm import accumulator

LANES = 32
"""The most lanes that one call may have, as in mix.c."""


@kernel("mix", "cpu", "cpu")
def mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """The kernel, once the sources have one type and the weights their full shape."""
    if only_torch(weights, *sources):
        return linear.mix(weights, sources)
    dtype = linear.stacked_type(sources)
    if dtype == torch.float16:
        return mix(weights.float(), tuple(source.float() for source in sources)).half()
    sources = tuple(source.to(dtype) for source in sources)
    require(*sources)
    weights = weights.to(accumulator(dtype)).expand(_shape(weights, sources))
    return MIX((weights, *sources))


def _shape(weights: Tensor, sources: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The shape that the weights must broadcast to."""
    first = sources[0].shape
    if len(first) != 3 or any(source.shape != first for source in sources):
        raise ValueError(f"mix takes sources of one shape [b t d], not {[tuple(source.shape) for source in sources]}")
    rows, tokens, width = first
    n = len(sources)
    shapes = {1: (n,), 2: (n, width), 3: (n, rows, tokens), 4: (weights.shape[0], n, rows, tokens)}
    if weights.ndim not in shapes:
        raise ValueError(f"mix takes weights [n], [n d], [n b t] or [lane n b t], not {tuple(weights.shape)}")
    if weights.ndim == 4 and len(weights) > LANES:
        raise Unsupported(f"{len(weights)} lanes; at most {LANES}")
    return shapes[weights.ndim]


def _reference(weights: Tensor, *sources: Tensor) -> Tensor:
    return reference.mix(weights, sources)


MIX = Operator(
    "mix",
    "Tensor weights, Tensor[] sources",
    Kernel(native.forward, native.backward, _reference),
    fake=lambda weights, first, *rest: first.new_empty((*weights.shape[:-3], *first.shape)),
)
