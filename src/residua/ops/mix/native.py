"""`mix` in C: every source read once where it is, forward and backward; only references are kept between them."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, pointers, threads
from residua.ops._backend import Unsupported, kernel
from residua.ops.mix import linear, reference
from residua.ops.norm import accumulator

ROWS, STATIC, CHANNELS = 0, 1, 2
"""Kinds of weights, as in mix.c."""

LANES = 32
"""The most lanes that one call may have, as in mix.c."""

STREAM = 1 << 23
"""Bytes of gradients above which they are written past the cache: they would not stay in it."""


@kernel("mix", "cpu", "cpu")
def mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """The kernel, once the sources have one type and the weights their full shape."""
    compiling = torch.compiler.is_compiling()
    if not compiling and traced(weights, *sources):
        return linear.mix(weights, sources)
    dtype = linear.stacked_type(sources)
    if dtype == torch.float16:
        return mix(weights.float(), tuple(source.float() for source in sources)).half()
    sources = tuple(source.to(dtype) for source in sources)
    if not compiling:
        require(*sources)
    weights = weights.to(accumulator(dtype)).expand(_shape(weights, sources))
    if compiling:
        from residua.ops.mix import operator

        return operator.mix(weights, list(sources))
    if torch.is_grad_enabled() and any(one.requires_grad for one in (weights, *sources)):
        return Mix.apply(weights, *sources)
    return forward(weights, sources)


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


class Mix(torch.autograd.Function):
    """sum_n w_n v_n."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        return forward(weights, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, *sources = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(lambda w, *v: reference.mix(w, v), ctx.saved_tensors, ctx.needs_input_grad, gradient)
        return backward(weights, tuple(sources), gradient, ctx.needs_input_grad)


def _strides(weights: Tensor) -> tuple[Tensor, int, tuple[int, int, int], int]:
    """The weights as C reads them: the tensor, its lanes, strides by lane, source and row, and its kind."""
    if weights.ndim == 1:
        weights = dense(weights)
        return weights, 1, (0, 1, 0), STATIC
    if weights.ndim == 2:
        return dense(weights), 1, (0, 0, 0), CHANNELS
    weights = weights.flatten(-2)
    if weights.data_ptr() % weights.element_size():
        weights = dense(weights)
    if weights.ndim == 2:
        weights = weights[None]
    return weights, weights.shape[0], weights.stride(), ROWS  # type: ignore[return-value]


def forward(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    shape = sources[0].shape
    read, lanes, strides, kind = _strides(weights)
    out = sources[0].new_empty((lanes, *shape) if weights.ndim == 4 else shape)
    if not out.numel():
        return out
    values = [dense(source) for source in sources]
    width = shape[-1]
    rows = values[0].numel() // width
    check(
        entry("residua_mix", c_int, c_int, c_void_p, c_void_p, c_void_p, *[c_int64] * 7, c_int)(
            TYPES[out.dtype], threads(len(values) * lanes * rows * width), pointers(values), read.data_ptr(),
            out.data_ptr(), len(values), lanes, rows, width, *strides, kind,
        )
    )  # fmt: skip
    return out


def backward(
    weights: Tensor, sources: tuple[Tensor, ...], gradient: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    read, lanes, strides, kind = _strides(weights)
    found = torch.zeros(weights.shape, dtype=weights.dtype) if wanted[0] else None
    grads = [torch.empty(source.shape, dtype=source.dtype) if want else None
             for source, want in zip(sources, wanted[1:], strict=True)]  # fmt: skip
    if not gradient.numel():
        return found, *(None if grad is None else grad.zero_() for grad in grads)
    values = [dense(source) for source in sources]
    width = sources[0].shape[-1]
    rows = sources[0].numel() // width
    numbers = len(values) * rows * width
    gradient = dense(gradient, sources[0].dtype)
    targets = (c_void_p * len(grads))(*map(address, grads))
    check(
        entry("residua_mix_backward", c_int, c_int, *[c_void_p] * 5, *[c_int64] * 7, c_int, c_int)(
            TYPES[gradient.dtype], threads(2 * numbers), pointers(values), address(read), address(gradient), targets,
            address(found), len(values), lanes, rows, width, *strides, kind,
            numbers * gradient.element_size() > STREAM,
        )
    )  # fmt: skip
    return found, *grads
