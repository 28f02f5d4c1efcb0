"""`shortconv` in C: every token read once a tap out of the cache, with neither the history nor the taps' terms made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.shortconv import reference


@kernel("shortconv", "cpu", "cpu")
def shortconv(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    """The kernel, once tokens and tail have one type."""
    if only_torch(x, tail, taps):
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
    return SHORTCONV((x, tail, taps.to(accumulator(dtype))))


def _sizes(x: Tensor, taps: Tensor) -> tuple[int, int, int, int]:
    """Sequences, tokens, taps and numbers a token."""
    return x.shape[0], x.shape[1], len(taps), taps[0].numel()


def _forward(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    if out.numel():
        tensors = dense(x), dense(tail), dense(taps), out
        call("residua_shortconv", x.dtype, x.numel() * len(taps), tensors, _sizes(x, taps))
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    x, _, taps = inputs
    found = empties(inputs, wanted)
    if not gradient.numel():
        return [None if one is None else one.zero_() for one in found]
    tensors = *map(dense, inputs), dense(gradient, x.dtype), *found
    call("residua_shortconv_backward", x.dtype, x.numel() * len(taps), tensors, _sizes(x, taps))
    return found


def _reference(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    return reference.shortconv(x, tail, taps).to(x.dtype)


SHORTCONV = Operator(
    "shortconv",
    "Tensor x, Tensor tail, Tensor taps",
    Kernel(_forward, _backward, _reference),
    fake=lambda x, *rest: x.new_empty(x.shape),
)
