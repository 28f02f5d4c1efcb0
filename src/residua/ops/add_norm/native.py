"""`add_norm` in C: both results in one pass, and one pass back; what is kept is the sum, which flows on anyway."""

from __future__ import annotations

from ctypes import c_double, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, threads
from residua.ops._backend import kernel
from residua.ops.add_norm import reference
from residua.ops.norm import accumulator


@kernel("add_norm", "cpu", "cpu")
def add_norm(h: Tensor, y: Tensor, gain: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """The kernel, once both have one type and the gain is of the type to add up in."""
    if traced(h, y, *(() if gain is None else (gain,))):
        return reference.add_norm(h, y, gain, eps=eps)
    dtype = torch.promote_types(h.dtype, y.dtype)
    if dtype == torch.float16:
        total, normed = add_norm(h.float(), y.float(), gain, eps=eps)
        return total.half(), normed.half()
    h, y = h.to(dtype), y.to(dtype)
    require(h)
    if h.shape != y.shape or h.ndim < 1 or (gain is not None and gain.shape != h.shape[-1:]):
        shapes = [tuple(one.shape) for one in (h, y, gain) if one is not None]
        raise ValueError(f"add_norm takes h and y of one shape [*n d] and a gain [d], not {shapes}")
    wide = accumulator(dtype)
    gain = torch.ones(h.shape[-1], dtype=wide) if gain is None else gain.to(wide)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (h, y, gain)):
        return AddNorm.apply(h, y, gain, eps)
    return _forward(h, y, gain, eps)


class AddNorm(torch.autograd.Function):
    """h + y, and its RMS norm."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = _forward(h, y, gain, eps)
        ctx.save_for_backward(total, gain)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, gradient: Tensor | None) -> Any:
        total, gain = ctx.saved_tensors
        if gradient is None:
            return through, through, None, None
        if torch.is_grad_enabled():
            zero = torch.zeros_like(total)
            found, for_gain = differentiate(
                lambda one, scale: reference.add_norm(one, zero, scale, eps=ctx.eps)[1],
                (total, gain), (True, ctx.needs_input_grad[2]), gradient,
            )  # fmt: skip
            found = found if through is None else found + through  # type: ignore[operator]
        else:
            found, for_gain = _backward(total, gain, through, gradient, ctx.needs_input_grad[2], ctx.eps)
        return found, found, for_gain, None


def _forward(h: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = torch.empty(h.shape, dtype=h.dtype), torch.empty(h.shape, dtype=h.dtype)
    if total.numel():
        h, y, gain = dense(h), dense(y), dense(gain)
        width = h.shape[-1]
        check(
            entry("residua_add_norm", c_int, c_int, *[c_void_p] * 5, *[c_int64] * 2, c_double)(
                TYPES[h.dtype], threads(h.numel()), *map(address, (h, y, gain, total, normed)),
                h.numel() // width, width, eps,
            )
        )  # fmt: skip
    return total, normed


def _backward(
    total: Tensor, gain: Tensor, through: Tensor | None, gradient: Tensor, wants_gain: bool, eps: float
) -> tuple[Tensor, Tensor | None]:
    found = torch.empty(total.shape, dtype=total.dtype)
    for_gain = torch.zeros(gain.shape, dtype=gain.dtype) if wants_gain else None
    if found.numel():
        total, gain, gradient = dense(total), dense(gain), dense(gradient, total.dtype)
        through = None if through is None else dense(through, total.dtype)
        width = total.shape[-1]
        check(
            entry("residua_add_norm_backward", c_int, c_int, *[c_void_p] * 6, *[c_int64] * 2, c_double)(
                TYPES[total.dtype], threads(2 * total.numel()),
                *map(address, (total, gain, gradient, through, found, for_gain)), total.numel() // width, width, eps,
            )
        )  # fmt: skip
    return found, for_gain
