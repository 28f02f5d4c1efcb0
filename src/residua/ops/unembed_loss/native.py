"""`unembed_loss` some rows at a time: out of the cache, logits become the loss and, in their place, its gradient.

No more logits are ever there than those of one stretch of rows. The gradients of x and of the weight are made with the
loss, and wait for the factor that the backward pass brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.native.guard import Unsupported, batched, dense, differentiate, empties, require, traced
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.unembed_loss import reference

STRETCH = 1 << 19
"""Logits that are made at once: of 2^18 to 2^22, what 4096 rows of 32 and of 64 numbers ran fastest with."""
LEAST = 128
"""Rows that are worth a pass over the weight."""


@kernel("unembed_loss", "cpu", "cpu")
def unembed_loss(x: Tensor, weight: Tensor, targets: Tensor, *, ignored: int = -100) -> Tensor:
    """The kernel, for x and a weight of one type outside autocast."""
    if traced(x, weight, targets) or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return reference.unembed_loss(x, weight, targets, ignored=ignored)
    if accumulator(x.dtype) != x.dtype:  # more exact than narrow logits, and on most processors faster
        return unembed_loss(x.float(), weight.float(), targets, ignored=ignored)
    require(x, weight)
    if x.ndim != 2 or weight.ndim != 2 or targets.shape != x.shape[:1] or targets.dtype != torch.int64:
        raise Unsupported(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}")
    counted = targets != ignored
    if bool(((targets < 0) | (targets >= len(weight))).logical_and_(counted).any()):
        raise IndexError(f"a target is outside of the vocabulary of {len(weight)}")
    targets = torch.where(counted, targets, -1)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Loss.apply(x, weight, targets)
    return _run(x, weight, targets, False, False)[0]


def _run(x: Tensor, weight: Tensor, targets: Tensor, by_x: bool, by_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients that are asked for; others are empty."""
    x, weight, targets = dense(x), dense(weight), dense(targets)
    rows = max(LEAST, STRETCH // max(1, len(weight)))
    losses = torch.empty(len(x), dtype=x.dtype, device="cpu")
    grad_x = torch.empty(x.shape if by_x else 0, dtype=x.dtype, device="cpu")
    grad_weight = torch.zeros(
        weight.shape[::-1] if by_weight else (0, 0), dtype=x.dtype, device="cpu"
    )  # lies as the logits do
    for first in range(0, len(x), rows):
        some = slice(first, first + rows)
        logits = torch.mm(x[some], weight.t())
        sizes = (*logits.shape, int(by_x or by_weight))
        call("residua_cross_entropy", x.dtype, logits.numel(), (logits, targets[some], losses[some]), sizes)
        if by_x:
            torch.mm(logits, weight, out=grad_x[some])
        if by_weight:
            grad_weight.addmm_(x[some].t(), logits)
    return losses.sum(), grad_x, grad_weight.t()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, *made = _run(x, weight, targets, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(x, weight, targets, *made)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, *made = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or batched(gradient):
            again = differentiate(
                lambda a, b: reference.unembed_loss(a, b, targets, ignored=-1), (x, weight), wanted, gradient
            )
            return *again, None
        found = empties((x, weight), wanted)
        for room, one in zip(found, made, strict=True):
            if room is not None:
                torch.mul(one, gradient, out=room)
        return *found, None
