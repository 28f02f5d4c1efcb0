"""`sinkhorn` with an eps: M = softmax over columns + eps, then M / (sum + eps) over rows, columns, rows, ...

To a compiler it is one node, as is `sinkhorn` without an eps, and for the same reason: forty divisions, and their
gradients, at every site of a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops.norm import accumulator


def sinkhorn(logits: Tensor, *, iterations: int, eps: float) -> Tensor:
    """On any device: small matrices, of which the rounds are cheap beside the streams that they mix."""
    logits = logits.to(accumulator(logits.dtype))
    # an exported graph runs where this operator, which is in Python, is not
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return _sinkhorn(logits, iterations, eps)
    return _rounds(logits, iterations, eps)[-1][1]


def _axes(iterations: int) -> tuple[int, ...]:
    """Of the sums that divide, after the softmax over columns: it is the first of the first round."""
    return (-1, *(-2, -1) * (iterations - 1))


def _rounds(logits: Tensor, iterations: int, eps: float) -> list[tuple[Tensor, Tensor]]:
    """What was divided by, and the result, of every step."""
    shares = logits.softmax(-2)
    steps = [(shares, shares + eps)]
    for axis in _axes(iterations):
        total = steps[-1][1].sum(axis, keepdim=True) + eps
        steps.append((total, steps[-1][1] / total))
    return steps


# schemas are written out: under jaxtyping's import hook annotations cannot be read back
@torch.library.custom_op(
    "residua::damped_sinkhorn", mutates_args=(), schema="(Tensor logits, int iterations, float eps) -> Tensor"
)
def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    return _rounds(logits, iterations, eps)[-1][1].contiguous()


@torch.library.custom_op(
    "residua::damped_sinkhorn_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor gradient, int iterations, float eps) -> Tensor",
)
def _sinkhorn_backward(logits: Tensor, gradient: Tensor, iterations: int, eps: float) -> Tensor:
    # by hand: there is no autograd inside an operator
    (shares, _), *steps = _rounds(logits, iterations, eps)
    for axis, (total, divided) in zip(reversed(_axes(iterations)), reversed(steps), strict=True):
        gradient = (gradient - (gradient * divided).sum(axis, keepdim=True)) / total
    return (shares * (gradient - (gradient * shares).sum(-2, keepdim=True))).contiguous()


@_sinkhorn.register_fake
def _(logits: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@_sinkhorn_backward.register_fake
def _(logits: Tensor, gradient: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    logits, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _sinkhorn_backward(*ctx.saved_tensors, gradient, ctx.iterations, ctx.eps), None, None


_sinkhorn.register_autograd(_gradient, setup_context=_keep)
