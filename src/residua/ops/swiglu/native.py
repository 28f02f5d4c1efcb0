"""`swiglu` in C: silu(a) is not kept, and the two gradients are made in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, bare, dense, empties, require, traced
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.swiglu import reference


@kernel("swiglu", "cpu", "cpu")
def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """The kernel, for two tensors of one shape and type; others PyTorch broadcasts and promotes."""
    if a.shape == b.shape and bare(a, b):
        return _run(a, b)
    if traced(a, b) or a.dtype != b.dtype or a.shape != b.shape:
        return reference.swiglu(a, b)
    if a.dtype == torch.float16:
        return swiglu(a.float(), b.float()).half()
    require(a, b)
    return SWIGLU((a, b))


def _forward(a: Tensor, b: Tensor) -> Tensor:
    return _run(dense(a), dense(b))


def _run(a: Tensor, b: Tensor) -> Tensor:
    """Of tensors as C reads them."""
    out = torch.empty_like(a)
    numbers = a.numel()
    if numbers:
        call("residua_swiglu", a.dtype, numbers, (a, b, out), (numbers,))
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    a, b = inputs
    found = empties(inputs, wanted)
    if a.numel():
        tensors = dense(a), dense(b), dense(gradient, a.dtype), *found
        call("residua_swiglu_backward", a.dtype, a.numel(), tensors, (a.numel(),))
    return found


SWIGLU = Kernel(_forward, _backward, reference.swiglu)
