"""`compress` in C: one pass over the state forward and one backward; only references are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, require, traced
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.compress import reference
from residua.ops.norm import accumulator


@kernel("compress", "cpu", "cpu")
def compress(weights: Tensor, X: Tensor) -> Tensor:
    """The kernel, with weights of the type to add up in."""
    if traced(weights, X):
        return reference.compress(weights, X)
    if X.dtype == torch.float16:
        return compress(weights, X.float()).half()
    require(X)
    if weights.shape != X.shape[-2:]:
        raise ValueError(f"compress takes weights of {tuple(X.shape[-2:])}, as X is, not {tuple(weights.shape)}")
    return KERNEL((weights.to(accumulator(X.dtype)), X))


def _sizes(X: Tensor) -> tuple[int, int, int]:
    channels, width = X.shape[-2:]
    return X.numel() // (channels * width), channels, width


def _forward(weights: Tensor, X: Tensor) -> Tensor:
    out = torch.empty((*X.shape[:-2], X.shape[-1]), dtype=X.dtype, device="cpu")
    if not X.numel():
        return out.zero_()
    call("residua_compress", X.dtype, X.numel(), (dense(weights), dense(X), out), _sizes(X))
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    weights, X = inputs
    found = empties(inputs, wanted)
    if not X.numel():
        return [None if one is None else one.zero_() for one in found]
    tensors = dense(weights), dense(X), dense(gradient, X.dtype), *found
    call("residua_compress_backward", X.dtype, 2 * X.numel(), tensors, _sizes(X))
    return found


KERNEL = Kernel(_forward, _backward, reference.compress)
