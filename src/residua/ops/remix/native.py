"""`remix` in C: a token's streams are recombined in the cache; only references are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require, watched
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.remix import reference


@kernel("remix", "cpu", "cpu")
def remix(weights: Tensor, H: Tensor, *, onto: Tensor | None = None, read: Tensor | None = None) -> Any:
    """The kernel, with weights of the type to add up in."""
    if read is not None:
        return _read_remix(read, weights, H)
    if only_torch(weights, H) or (onto is not None and only_torch(onto)):
        return reference.remix(weights, H, onto=onto)
    if H.dtype == torch.float16:
        if onto is None or onto.dtype != torch.float16:
            return reference.added(onto, remix(weights.float(), H.float()).half())
        return remix(weights.float(), H.float(), onto=onto.float()).half()
    inputs = _checked(weights, H), H
    if onto is None:
        return REMIX(inputs)
    if watched() or onto.dtype is not H.dtype or onto.shape != _shape(*inputs) or not onto.is_cpu or not H.numel():
        return onto + REMIX(inputs)
    return ONTO((*inputs, onto))


def _read_remix(read: Tensor, weights: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one pass; what has no kernel, as two mixtures."""
    if only_torch(read, weights, H) or H.dtype == torch.float16:
        return remix(read[..., None], H).squeeze(-2), remix(weights, H)
    return READ((_checked(read[..., None], H).squeeze(-1), _checked(weights, H), H))


def _checked(weights: Tensor, H: Tensor) -> Tensor:
    """The weights in full and of the type to add up in."""
    require(H)
    if weights.ndim != 4 or H.ndim != 4:
        raise ValueError(f"remix takes weights [b t s m] and H [b t s d], not {weights.shape} and {H.shape}")
    return weights.to(accumulator(H.dtype)).expand(*H.shape[:3], -1)


def _sizes(weights: Tensor, H: Tensor) -> tuple[int, int, int, int]:
    """Tokens, streams, outputs and the width."""
    rows, tokens, streams, width = H.shape
    return rows * tokens, streams, weights.shape[-1], width


def _shape(weights: Tensor, H: Tensor) -> tuple[int, ...]:
    """That of the result."""
    return *H.shape[:2], weights.shape[-1], H.shape[-1]


def _forward(weights: Tensor, H: Tensor) -> Tensor:
    out = torch.empty(_shape(weights, H), dtype=H.dtype, device="cpu")
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
    out = torch.empty(onto.shape, dtype=H.dtype, device="cpu")
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


def _forward_read(read: Tensor, weights: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    x, out = (
        torch.empty((*H.shape[:2], H.shape[3]), dtype=H.dtype, device="cpu"),
        torch.empty(_shape(weights, H), dtype=H.dtype, device="cpu"),
    )
    if not H.numel():
        return x.zero_(), out.zero_()
    read, weights, H = _in_turn(read), _in_turn(weights), dense(H)
    call(
        "residua_read_remix", H.dtype, H.numel() * (1 + weights.shape[-1]), (H, read, weights, x, out),
        (*_sizes(weights, H), *read.stride()[1:], *weights.stride()[1:]),
    )  # fmt: skip
    return x, out


def _backward_read(
    inputs: Sequence[Tensor], wanted: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    read, weights, H = inputs
    g_x, g = (dense(one, H.dtype) for one in gradients)
    room = _room(weights)
    found = [*empties((read,), wanted[:1]), room if wanted[1] else None, *empties((H,), wanted[2:])]
    if not H.numel():
        return [None if one is None else one.zero_() for one in found]
    read, weights, H = _in_turn(read), _in_turn(weights), dense(H)
    call(
        "residua_read_remix_backward", H.dtype, 2 * H.numel() * (1 + weights.shape[-1]),
        (H, read, weights, g_x, g, found[2], found[0], found[1]),
        (*_sizes(weights, H), *read.stride()[1:], *weights.stride()[1:], *room.stride()[2:]),
    )  # fmt: skip
    return found


def _room(weights: Tensor) -> Tensor:
    """For their gradient: in their own order, so that transposed ones go back to who made them as they were."""
    like, each = torch.empty_like(weights), weights.shape[2] * weights.shape[3]
    return (
        like
        if like.stride()[:2] == (weights.shape[1] * each, each)
        else torch.empty(weights.shape, dtype=like.dtype, device="cpu")
    )


def _in_turn(weights: Tensor) -> Tensor:
    """Weights that the kernel takes by their strides: tokens a fixed step apart, through all rows."""
    steady = weights.stride(0) == weights.shape[1] * weights.stride(1)
    return dense(weights) if not steady or weights.is_neg() or weights.data_ptr() % weights.element_size() else weights


REMIX = Operator(
    "remix",
    "Tensor weights, Tensor H",
    Kernel(_forward, _backward, reference.remix),
    fake=lambda weights, H: H.new_empty(_shape(weights, H)),
)
ONTO = Kernel(
    _forward_onto, _backward_onto, lambda weights, H, onto: reference.remix(weights, H, onto=onto)
)  # to a compiler, an addition
READ = Operator(
    "read_remix",
    "Tensor read, Tensor weights, Tensor H",
    Kernel(_forward_read, _backward_read, lambda read, weights, H: reference.remix(weights, H, read=read)),
    fake=lambda read, weights, H: (H.new_empty(*H.shape[:2], H.shape[3]), H.new_empty(_shape(weights, H))),
    results=2,
)
