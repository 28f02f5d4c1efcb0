"""`sinkhorn` in C: all rounds of eight matrices at once; the backward pass repeats them instead of keeping them.

To a compiler it is one node, `residua::sinkhorn`: twenty rounds in logarithms, and their gradients, at every site of a
model take it minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, require, traced
from residua.native.library import available, call
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.sinkhorn import reference


@kernel("sinkhorn", "cpu", "cpu")
def sinkhorn(logits: Tensor, *, iterations: int) -> Tensor:
    """The kernel, on logits of the type to add up in."""
    if torch.compiler.is_compiling() and iterations > 0:
        return _sinkhorn(logits.to(accumulator(logits.dtype)), iterations)
    if traced(logits) or iterations < 1:
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


SINKHORN = Kernel(_forward, _backward, _reference)


# schemas are written out: under jaxtyping's import hook annotations cannot be read back
@torch.library.custom_op(
    "residua::sinkhorn", mutates_args=(), device_types="cpu", schema="(Tensor logits, int iterations) -> Tensor"
)
def _sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    return _forward(logits, iterations) if available() else _reference(logits, iterations)


@torch.library.custom_op(
    "residua::sinkhorn_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor logits, Tensor gradient, int iterations) -> Tensor",
)
def _sinkhorn_backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    if available():
        return _backward((logits,), (True,), gradient, iterations)[0]
    # by hand: there is no autograd inside an operator
    rounds = []
    for axis in (-2, -1) * iterations:
        logits = logits - logits.logsumexp(axis, keepdim=True)
        rounds.append((axis, logits.exp()))
    gradient = gradient * rounds[-1][1]
    for axis, shares in reversed(rounds):
        gradient = gradient - shares * gradient.sum(axis, keepdim=True)
    return gradient


@_sinkhorn.register_fake
def _(logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@_sinkhorn_backward.register_fake
def _(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _sinkhorn_backward(*ctx.saved_tensors, gradient, ctx.iterations), None


_sinkhorn.register_autograd(_gradient, setup_context=_keep)
