"""Calls of `mix` in C, on plain tensors and without autograd: `cpu` and `operator` wrap them.

Every source is read once where it is, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from residua.native.guard import dense, empties
from residua.native.library import TYPES, address, check, entry, pointers, threads

ROWS, STATIC, CHANNELS = 0, 1, 2
"""Kinds of weights, as in mix.c."""

STREAM = 1 << 23
"""Bytes of gradients above which they are written past the cache: they would not stay in it."""


def _strides(weights: Tensor) -> tuple[Tensor, int, tuple[int, int, int], int]:
    """The weights as C reads them: the tensor, its lanes, strides by lane, source and row, and its kind."""
    if weights.ndim == 1:
        weights = dense(weights)
        return weights, 1, (0, 1, 0), STATIC
    if weights.ndim == 2:
        return dense(weights), 1, (0, 0, 0), CHANNELS
    weights = weights.flatten(-2)
    if weights.is_neg() or weights.data_ptr() % weights.element_size():
        weights = dense(weights)
    if weights.ndim == 2:
        weights = weights[None]
    return weights, weights.shape[0], weights.stride(), ROWS  # type: ignore[return-value]


def forward(weights: Tensor, *sources: Tensor) -> Tensor:
    """sum_n w_n v_n, for weights of full shape and of the type to add up in."""
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


def backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    """The gradients of the weights and of every source, where they are wanted."""
    weights, *sources = inputs
    read, lanes, strides, kind = _strides(weights)
    found, grads = (
        torch.zeros(weights.shape, dtype=weights.dtype, device="cpu") if wanted[0] else None,
        empties(sources, wanted[1:]),
    )
    if not gradient.numel():
        return [found, *(None if grad is None else grad.zero_() for grad in grads)]
    values = [dense(source) for source in sources]
    width = sources[0].shape[-1]
    rows = sources[0].numel() // width
    numbers = len(values) * rows * width
    gradient = dense(gradient, sources[0].dtype)
    check(
        entry("residua_mix_backward", c_int, c_int, *[c_void_p] * 5, *[c_int64] * 7, c_int, c_int)(
            TYPES[gradient.dtype], threads(2 * numbers), pointers(values), address(read), address(gradient),
            pointers(grads), address(found), len(values), lanes, rows, width, *strides, kind,
            numbers * gradient.element_size() > STREAM,
        )
    )  # fmt: skip
    return [found, *grads]
