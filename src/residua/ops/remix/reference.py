"""The definition of `remix`."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm import accumulator


def remix(weights: Tensor, H: Tensor) -> Tensor:
    """One einsum over the streams."""
    wide = accumulator(H.dtype)
    return torch.einsum("btsm,btsd->btmd", weights.to(wide), H.to(wide)).to(H.dtype)
