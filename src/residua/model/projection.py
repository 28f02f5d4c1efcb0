"""The matrices of sublayers, as modules and as numbers alone."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from residua import ops
from residua.native.guard import watched


class Projection(nn.Linear):
    """x W'."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n c"]:
        return ops.project(x, self.weight)


def matrices(*maps: Any) -> tuple[Tensor, ...]:
    """The weights of some projections, for an op that takes them at once. None of them unless numbers of their own type
    alone are wanted, and calling each is nothing but its product: nobody hooked, wrapped, replaced or watches it."""
    if torch.is_grad_enabled() or watched() or _modules._has_any_global_hook():
        return ()
    for one in maps:
        if type(one) is not Projection or one._forward_hooks or one._forward_pre_hooks:
            return ()
    found = tuple([one._parameters["weight"] for one in maps])
    return () if torch.is_autocast_enabled("cpu" if found[0].is_cpu else found[0].device.type) else found
