"""`delta_write` in C: two sweeps over each token's state, forward and backward; only references are kept."""

from __future__ import annotations

from ctypes import c_double, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, threads
from residua.ops._backend import kernel
from residua.ops.delta_write import reference
from residua.ops.norm import accumulator


@kernel("delta_write", "cpu", "cpu")
def delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, *, eps: float) -> Tensor:
    """The kernel, with a direction of the state's type and gates of the type to add up in."""
    if traced(X, k, value, beta):
        return reference.delta_write(X, k, value, beta, eps=eps)
    if X.dtype == torch.float16:
        return delta_write(X.float(), k, value, beta, eps=eps).half()
    require(X)
    wide = accumulator(X.dtype)
    if torch.promote_types(k.dtype, X.dtype) != X.dtype:
        # a direction finer than the state is not rounded to it
        return delta_write(X.to(k.dtype), k, value, beta, eps=eps).to(X.dtype)
    rows, tokens, channels, width = X.shape
    for name, one, shape in (("k", k, (rows, tokens, width)), ("value", value, (rows, tokens, channels)),
                             ("beta", beta, (rows, tokens))):  # fmt: skip
        if one.shape != shape:
            raise ValueError(f"delta_write: {name} is {tuple(one.shape)}, but X {tuple(X.shape)} needs {shape}")
    inputs = X, k.to(X.dtype), value.to(wide), beta.to(wide)
    if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
        return DeltaWrite.apply(*inputs, eps)
    return _forward(*inputs, eps)


class DeltaWrite(torch.autograd.Function):
    """X + beta (v - X u) u'."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(X, k, value, beta)
        ctx.eps = eps
        return _forward(X, k, value, beta, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            found = differentiate(
                lambda *inputs: reference.delta_write(*inputs, eps=ctx.eps), ctx.saved_tensors, wanted, gradient
            )
        else:
            found = _backward(ctx.saved_tensors, wanted, gradient, ctx.eps)
        return *found, None


def _state(X: Tensor) -> tuple[Tensor, int, int]:
    """The state with its strides by token and by channel; channels that repeat one row stay as they are."""
    channels, width = X.shape[2:]
    if X.stride(2) == 0 and channels > 1:
        return dense(X[:, :, 0]), width, 0
    return dense(X), channels * width, width


def _forward(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, eps: float) -> Tensor:
    out = torch.empty(X.shape, dtype=X.dtype)
    if not out.numel():
        return out
    rows, tokens, channels, width = X.shape
    state, by_row, by_channel = _state(X)
    k, value, beta = dense(k), dense(value), dense(beta)
    check(
        entry("residua_delta_write", c_int, c_int, *[c_void_p] * 5, *[c_int64] * 5, c_double)(
            TYPES[X.dtype], threads(out.numel()), *map(address, (state, k, value, beta, out)),
            rows * tokens, channels, width, by_row, by_channel, eps,
        )
    )  # fmt: skip
    return out


def _backward(
    inputs: tuple[Tensor, ...], wanted: tuple[bool, ...], gradient: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    X, k, value, beta = inputs
    found = [
        torch.empty(one.shape, dtype=one.dtype) if want else None for one, want in zip(inputs, wanted, strict=True)
    ]
    if not X.numel():
        return tuple(None if one is None else one.zero_() for one in found)
    rows, tokens, channels, width = X.shape
    state, by_row, by_channel = _state(X)
    k, value, beta, gradient = dense(k), dense(value), dense(beta), dense(gradient, X.dtype)
    check(
        entry("residua_delta_write_backward", c_int, c_int, *[c_void_p] * 9, *[c_int64] * 5, c_double)(
            TYPES[X.dtype], threads(2 * gradient.numel()), *map(address, (state, k, value, beta, gradient, *found)),
            rows * tokens, channels, width, by_row, by_channel, eps,
        )
    )  # fmt: skip
    return tuple(found)
