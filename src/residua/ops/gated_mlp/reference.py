"""The definition of `gated_mlp`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Three products and a gate."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
