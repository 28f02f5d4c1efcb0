"""`remix` in C: a token's streams are recombined in the cache; only references are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require, watched
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.remix import reference


@kernel("remix", "cpu", "cpu")
def remix(weights: Tensor, H: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """The kernel, with weights of the type to add up in."""
    if only_torch(weights, H) or (onto is not None and only_torch(onto)):
        return reference.remix(weights, H, onto=onto)
    if H.dtype == torch.float16:
        if onto is None or onto.dtype != torch.float16:
            return reference.added(onto, remix(weights.float(), H.float()).half())
        return remix(weights.float(), H.float(), onto=onto.float()).half()
    require(H)
    if weights.ndim != 4 or H.ndim != 4:
        raise ValueError(f"remix takes weights [b t s m] and H [b t s d], not {weights.shape} and {H.shape}")
    inputs = weights.to(accumulator(H.dtype)).expand(*H.shape[:3], -1), H
    if onto is None:
        return REMIX(inputs)
    if watched() or onto.dtype is not H.dtype or onto.shape != _shape(*inputs) or not onto.is_cpu or not H.numel():
        return onto + REMIX(inputs)
    return ONTO((*inputs, onto))


def _sizes(weights: Tensor, H: Tensor) -> tuple[int, int, int, int]:
    """Tokens, streams, outputs and the width."""
    rows, tokens, streams, width = H.shape
    return rows * tokens, streams, weights.shape[-1], width


def _shape(weights: Tensor, H: Tensor) -> tuple[int, ...]:
    """That of the result."""
    return *H.shape[:2], weights.shape[-1], H.shape[-1]


def _forward(weights: Tensor, H: Tensor) -> Tensor:
    out = torch.empty(_shape(weights, H), dtype=H.dtype)
    if not H.shape[2]:
        return out.zero_()
    if out.numel():
        weights, H = dense(weights), dense(H)
        call("residua_remix", H.dtype, H.numel() * weights.shape[-1], (H, weights, None, out), (*_sizes(weights, H), 0))
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    weights, H = inputs
    found = empties(inputs, wanted)
    if not gradient.numel() or not H.numel():
        return [None if one is None else one.zero_() for one in found]
    weights, H, gradient = dense(weights), dense(H), dense(gradient, H.dtype)
    call(
        "residua_remix_backward", H.dtype, 2 * H.numel() * weights.shape[-1], (H, weights, gradient, *found[::-1]),
        _sizes(weights, H),
    )  # fmt: skip
    return found


def _forward_onto(weights: Tensor, H: Tensor, onto: Tensor) -> Tensor:
    out = torch.empty(onto.shape, dtype=H.dtype)
    weights, H, (onto, step) = dense(weights), dense(H), _tokens(onto)
    call(
        "residua_remix", H.dtype, H.numel() * weights.shape[-1], (H, weights, onto, out),
        (*_sizes(weights, H), step),
    )  # fmt: skip
    return out


def _tokens(onto: Tensor) -> tuple[Tensor, int]:
    """Tokens as the kernel takes them, and the numbers from one to the next: a slice of more streams is one too."""
    step, (_, tokens, made, width) = onto.stride(1), onto.shape
    aligned = onto.data_ptr() % onto.element_size() == 0
    if onto.stride() == (tokens * step, step, width, 1) and not onto.is_neg() and aligned:
        return onto, step
    return dense(onto), made * width


def _backward_onto(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    return [*_backward(inputs[:2], wanted[:2], gradient), gradient if wanted[2] else None]


REMIX = Operator(
    "remix",
    "Tensor weights, Tensor H",
    Kernel(_forward, _backward, reference.remix),
    fake=lambda weights, H: H.new_empty(_shape(weights, H)),
)
ONTO = Kernel(
    _forward_onto, _backward_onto, lambda weights, H, onto: reference.remix(weights, H, onto=onto)
)  # to a compiler, an addition
