"""`remix` in C: a token's streams are recombined in the cache; only references are kept for the backward pass."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import address, dense, differentiate, require, traced
from residua.native.library import TYPES, check, entry, threads
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.remix import reference


@kernel("remix", "cpu", "cpu")
def remix(weights: Tensor, H: Tensor) -> Tensor:
    """The kernel, with weights of the type to add up in."""
    if traced(weights, H):
        return reference.remix(weights, H)
    if H.dtype == torch.float16:
        return remix(weights.float(), H.float()).half()
    require(H)
    if weights.ndim != 4 or H.ndim != 4:
        raise ValueError(f"remix takes weights [b t s m] and H [b t s d], not {weights.shape} and {H.shape}")
    weights = weights.to(accumulator(H.dtype)).expand(*H.shape[:3], -1)
    if torch.is_grad_enabled() and (weights.requires_grad or H.requires_grad):
        return Remix.apply(weights, H)
    return _forward(weights, H)


class Remix(torch.autograd.Function):
    """sum_s weights[s, m] H_s."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, H: Tensor) -> Tensor:
        ctx.save_for_backward(weights, H)
        return _forward(weights, H)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            return differentiate(reference.remix, ctx.saved_tensors, ctx.needs_input_grad, gradient)
        weights, H = ctx.saved_tensors
        return _backward(weights, H, gradient, ctx.needs_input_grad)


def _forward(weights: Tensor, H: Tensor) -> Tensor:
    rows, tokens, streams, width = H.shape
    made = weights.shape[-1]
    out = torch.empty(rows, tokens, made, width, dtype=H.dtype)
    if not streams:
        return out.zero_()
    if not out.numel():
        return out
    weights, H = dense(weights), dense(H)
    check(
        entry("residua_remix", c_int, c_int, *[c_void_p] * 3, *[c_int64] * 4)(
            TYPES[H.dtype], threads(H.numel() * made), *map(address, (H, weights, out)),
            rows * tokens, streams, made, width,
        )
    )  # fmt: skip
    return out


def _backward(weights: Tensor, H: Tensor, gradient: Tensor, wanted: tuple[bool, bool]) -> Any:
    found = [torch.empty(one.shape, dtype=one.dtype) if want else None
             for one, want in zip((weights, H), wanted, strict=True)]  # fmt: skip
    rows, tokens, streams, width = H.shape
    if not gradient.numel() or not H.numel():
        return tuple(None if one is None else one.zero_() for one in found)
    weights, H, gradient = dense(weights), dense(H), dense(gradient, H.dtype)
    grad_weights, grad_H = found
    check(
        entry("residua_remix_backward", c_int, c_int, *[c_void_p] * 5, *[c_int64] * 4)(
            TYPES[H.dtype], threads(2 * H.numel() * weights.shape[-1]),
            *map(address, (H, weights, gradient, grad_H, grad_weights)),
            rows * tokens, streams, weights.shape[-1], width,
        )
    )  # fmt: skip
    return tuple(found)
