"""`mix` in PyTorch without a stack: where there is no kernel, memory stays linear in the sources.

The sources are kept by reference, not in the type they are added up in; a compiler gets the bare loop, which it
fuses, and decides for itself what to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import differentiate, traced
from residua.ops._context import Context
from residua.ops.mix import reference
from residua.ops.norm import accumulator

SMALL = 1 << 16
"""Below so many numbers a stack costs less than a loop in Python: decoding."""


def mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """One multiply-add per source."""
    dtype = stacked_type(sources)
    weights = weights.to(accumulator(dtype))
    if traced(weights, *sources):
        return _mix(weights, sources).to(dtype)
    if len(sources) * sources[0].numel() < SMALL:
        return reference.mix(weights, sources)
    return LinearMix.apply(weights, *(source.to(dtype) for source in sources))


def stacked_type(sources: tuple[Tensor, ...]) -> torch.dtype:
    """The type that a stack of the sources would have."""
    dtype = sources[0].dtype
    for source in sources:
        dtype = torch.promote_types(dtype, source.dtype)
    return dtype


def _each(weights: Tensor) -> tuple[Tensor, ...]:
    """The weights of each source, in a shape that spreads over [*lane b t d]."""
    if weights.ndim < 3:
        return weights.unbind(0)
    return weights.unsqueeze(-1).unbind(weights.ndim - 3)


def _mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    first, *rest = _each(weights)
    total = first * sources[0].to(weights.dtype)
    for weight, source in zip(rest, sources[1:], strict=True):
        total = total.addcmul(weight, source.to(weights.dtype))
    return total


class LinearMix(torch.autograd.Function):
    """sum_n w_n v_n."""

    @staticmethod
    def forward(ctx: Context, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        return _mix(weights, sources).to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return differentiate(lambda w, *v: reference.mix(w, v), ctx.saved_tensors, wanted, gradient)
        return tuple(gradients(weights, sources, gradient, wanted))


def gradients(
    weights: Tensor, sources: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Of the weights and of every source, where they are wanted."""
    gradient = gradient.to(weights.dtype)
    pieces, grads = [], []
    for weight, source, want in zip(_each(weights), sources, wanted[1:], strict=True):
        # a lane axis in front is summed away
        grads.append((gradient * weight).sum_to_size(source.shape).to(source.dtype) if want else None)
        if wanted[0]:
            pieces.append((gradient * source.to(weights.dtype)).sum_to_size(weight.shape))
    axis = max(0, weights.ndim - 3)
    return [torch.stack(pieces, axis).reshape(weights.shape) if pieces else None, *grads]
