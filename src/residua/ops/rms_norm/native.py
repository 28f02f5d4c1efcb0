"""`rms_norm` in C: one pass over x forward and one backward, with nothing kept but x and the gain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, bare, dense, empties, require, traced
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.rms_norm import reference


@kernel("rms_norm", "cpu", "cpu")
def rms_norm(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """The kernel, for a gain of x's own type; other types are promoted as PyTorch promotes them."""
    given = (x,) if gain is None else (x, gain)
    if bare(*given) and x.dtype is not torch.bfloat16 and (gain is None or gain.shape == x.shape[-1:]):
        return _run(x, gain, eps)
    if traced(*given) or any(one.dtype != x.dtype for one in given):
        return reference.rms_norm(x, eps, gain)
    if x.dtype == torch.float16:
        return rms_norm(x.float(), eps, None if gain is None else gain.float()).half()
    require(*given)
    if gain is not None and gain.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm of {tuple(x.shape)} takes a gain of {tuple(x.shape[-1:])}, not {tuple(gain.shape)}")
    return GAINLESS((x,), eps) if gain is None else GAINED((x, gain), eps)


def _wide(gain: Tensor | None) -> Tensor | None:
    """The gain as C reads it."""
    return None if gain is None else dense(gain, accumulator(gain.dtype))


def _forward(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return _run(dense(x), _wide(gain), eps)


def _run(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Of tensors as C reads them."""
    out = torch.empty_like(x)
    numbers = x.numel()
    if numbers:
        width = x.shape[-1]
        call("residua_rms_norm", x.dtype, numbers, (x, gain, out), (numbers // width, width), eps)
    return out


def _backward(inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, eps: float) -> list[Tensor | None]:
    x, gain = inputs[0], inputs[1] if len(inputs) > 1 else None
    found = empties(inputs, wanted)
    if not x.numel():
        return [None if one is None else one.zero_() for one in found]
    wide = None
    if gain is not None and wanted[1]:
        wide = torch.empty(gain.shape, dtype=accumulator(gain.dtype), device="cpu")
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    tensors = dense(x), _wide(gain), dense(gradient, x.dtype), found[0], wide
    call("residua_rms_norm_backward", x.dtype, x.numel(), tensors, sizes, eps)
    return found if wide is None else [found[0], wide.to(x.dtype)]


GAINED = Kernel(_forward, _backward, lambda x, gain, eps: reference.rms_norm(x, eps, gain))
GAINLESS = Kernel(lambda x, eps: _forward(x, None, eps), _backward, reference.rms_norm)
