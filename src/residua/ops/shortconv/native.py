"""`shortconv` in C: every token read once a tap out of the cache, with neither the history nor the taps' terms made."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, threads
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.shortconv import reference


@kernel("shortconv", "cpu", "cpu")
def shortconv(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    """The kernel, once tokens and tail have one type."""
    if traced(x, tail, taps):
        return reference.shortconv(x, tail, taps)
    dtype = torch.promote_types(torch.promote_types(x.dtype, tail.dtype), taps.dtype)
    if dtype == torch.float16:
        return shortconv(x.float(), tail.float(), taps.float()).half()
    x, tail = x.to(dtype), tail.to(dtype)
    require(x)
    if x.ndim < 2 or len(taps) < 1 or taps.shape[1:] != x.shape[2:]:
        raise ValueError(f"shortconv takes x [b t *c] and taps [k *c], not {tuple(x.shape)} and {tuple(taps.shape)}")
    if tail.shape != (x.shape[0], len(taps) - 1, *x.shape[2:]):
        raise ValueError(f"shortconv: {len(taps)} taps need a tail of {len(taps) - 1} tokens, not {tuple(tail.shape)}")
    inputs = x, tail, taps.to(accumulator(dtype))
    if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
        return ShortConv.apply(*inputs)
    return _forward(*inputs)


class ShortConv(torch.autograd.Function):
    """y[t] = sum_s taps[s] x[t - s]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, tail, taps)
        return _forward(x, tail, taps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            dtype = gradient.dtype
            return differentiate(
                lambda *inputs: reference.shortconv(*inputs).to(dtype),
                ctx.saved_tensors,
                ctx.needs_input_grad,
                gradient,
            )
        return _backward(ctx.saved_tensors, gradient, ctx.needs_input_grad)


def _sizes(x: Tensor, taps: Tensor) -> tuple[int, int, int, int]:
    """Sequences, tokens, taps and numbers a token."""
    return x.shape[0], x.shape[1], len(taps), taps[0].numel()


def _forward(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    if out.numel():
        x, tail, taps = dense(x), dense(tail), dense(taps)
        check(
            entry("residua_shortconv", c_int, c_int, *[c_void_p] * 4, *[c_int64] * 4)(
                TYPES[x.dtype], threads(x.numel() * len(taps)), *map(address, (x, tail, taps, out)), *_sizes(x, taps)
            )
        )
    return out


def _backward(inputs: tuple[Tensor, ...], gradient: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    found = [
        torch.empty(one.shape, dtype=one.dtype) if want else None for one, want in zip(inputs, wanted, strict=True)
    ]
    if not gradient.numel():
        return tuple(None if one is None else one.zero_() for one in found)
    x, tail, taps = (dense(one) for one in inputs)
    gradient = dense(gradient, x.dtype)
    check(
        entry("residua_shortconv_backward", c_int, c_int, *[c_void_p] * 7, *[c_int64] * 4)(
            TYPES[x.dtype], threads(x.numel() * len(taps)), *map(address, (x, tail, taps, gradient, *found)),
            *_sizes(x, taps),
        )
    )  # fmt: skip
    return tuple(found)
