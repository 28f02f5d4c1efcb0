"""`mix` as one node of a compiled graph: `residua::mix`, which calls the kernel when the graph runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.native.library import available
from residua.ops.mix import linear, native


# schemas are written out: under jaxtyping's import hook annotations cannot be read back
@torch.library.custom_op("residua::mix", mutates_args=(), schema="(Tensor weights, Tensor[] sources) -> Tensor")
def mix(weights: Tensor, sources: list[Tensor]) -> Tensor:
    """sum_n w_n v_n, for weights of full shape and of the type to add up in."""
    return native.forward(weights, *sources) if available() else linear.mix(weights, tuple(sources))


@mix.register_fake
def _(weights: Tensor, sources: list[Tensor]) -> Tensor:
    return sources[0].new_empty((*weights.shape[:-3], *sources[0].shape))


@torch.library.custom_op(
    "residua::mix_backward",
    mutates_args=(),
    schema="(Tensor weights, Tensor[] sources, Tensor gradient) -> Tensor[]",
)
def mix_backward(weights: Tensor, sources: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """The gradients of the weights and of every source."""
    every = (True,) * (1 + len(sources))
    if available():
        found = native.backward((weights, *sources), every, gradient)
    else:
        found = linear.gradients(weights, sources, gradient, every)
    return [one for one in found if one is not None]


@mix_backward.register_fake
def _(weights: Tensor, sources: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (weights, *sources)]


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    weights, *sources = ctx.saved_tensors
    found, *grads = mix_backward(weights, sources, gradient)
    return found, grads


mix.register_autograd(_gradients, setup_context=_keep)
