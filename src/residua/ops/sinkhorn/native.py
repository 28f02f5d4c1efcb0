"""`sinkhorn` in C: all rounds of eight matrices at once; the backward pass repeats them instead of keeping them."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, threads
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.sinkhorn import reference


@kernel("sinkhorn", "cpu", "cpu")
def sinkhorn(logits: Tensor, *, iterations: int) -> Tensor:
    """The kernel, on logits of the type to add up in."""
    if traced(logits) or iterations < 1:
        return reference.sinkhorn(logits, iterations=iterations)
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"sinkhorn takes square matrices, not {tuple(logits.shape)}")
    logits = logits.to(accumulator(logits.dtype))
    require(logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        return Sinkhorn.apply(logits, iterations)
    return _forward(logits, iterations)


class Sinkhorn(torch.autograd.Function):
    """(rows o columns)^n exp(logits)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations = iterations
        return _forward(logits, iterations)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            (found,) = differentiate(
                lambda one: reference.sinkhorn(one, iterations=ctx.iterations), (logits,), (True,), gradient
            )
            return found, None
        return _backward(logits, gradient, ctx.iterations), None


def _forward(logits: Tensor, iterations: int) -> Tensor:
    logits = dense(logits)
    out = torch.empty_like(logits)
    if out.numel():
        size = logits.shape[-1]
        check(
            entry("residua_sinkhorn", c_int, c_int, *[c_void_p] * 2, *[c_int64] * 3)(
                TYPES[logits.dtype], threads(out.numel() * iterations), address(logits), address(out),
                out.numel() // size**2, size, iterations,
            )
        )  # fmt: skip
    return out


def _backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    logits, gradient = dense(logits), dense(gradient)
    out = torch.empty_like(logits)
    if out.numel():
        size = logits.shape[-1]
        check(
            entry("residua_sinkhorn_backward", c_int, c_int, *[c_void_p] * 3, *[c_int64] * 3)(
                TYPES[logits.dtype], threads(2 * out.numel() * iterations), *map(address, (logits, gradient, out)),
                out.numel() // size**2, size, iterations,
            )
        )  # fmt: skip
    return out
