"""`sinkhorn` in C: all rounds of eight matrices at once; the backward pass repeats them instead of keeping them.

To a compiler it is one node, `residua::sinkhorn`: twenty rounds in logarithms, and their gradients, at every site of a
model take it minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, only_torch, require
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.sinkhorn import reference


@kernel("sinkhorn", "cpu", "cpu")
def sinkhorn(logits: Tensor, *, iterations: int) -> Tensor:
    """The kernel, on logits of the type to add up in."""
    if only_torch(logits) or iterations < 1:
        return reference.sinkhorn(logits, iterations=iterations)
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"sinkhorn takes square matrices, not {tuple(logits.shape)}")
    logits = logits.to(accumulator(logits.dtype))
    require(logits)
    return SINKHORN((logits,), iterations)


def _forward(logits: Tensor, iterations: int) -> Tensor:
    logits = dense(logits)
    out = torch.empty_like(logits)
    if out.numel():
        call("residua_sinkhorn", out.dtype, out.numel() * iterations, (logits, out), _sizes(out, iterations))
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, iterations: int) -> tuple[Tensor]:
    logits, gradient = dense(inputs[0]), dense(gradient)
    out = torch.empty_like(logits)
    if out.numel():
        tensors = logits, gradient, out
        call("residua_sinkhorn_backward", out.dtype, 2 * out.numel() * iterations, tensors, _sizes(out, iterations))
    return (out,)


def _sizes(matrices: Tensor, iterations: int) -> tuple[int, int, int]:
    size = matrices.shape[-1]
    return matrices.numel() // size**2, size, iterations


def _reference(logits: Tensor, iterations: int) -> Tensor:
    return reference.sinkhorn(logits, iterations=iterations)


SINKHORN = Operator(
    "sinkhorn",
    "Tensor logits, int iterations",
    Kernel(_forward, _backward, _reference),
    fake=lambda logits, iterations: logits.new_empty(logits.shape),
)
