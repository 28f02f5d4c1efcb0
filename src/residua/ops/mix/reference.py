"""The definition of `mix`."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm import accumulator

_PATTERNS = {1: "n,nbtd->btd", 2: "nd,nbtd->btd", 3: "nbt,nbtd->btd", 4: "cnbt,nbtd->cbtd"}


def mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """One einsum over the stack."""
    values = torch.stack(sources)
    wide = accumulator(values.dtype)
    return torch.einsum(_PATTERNS[weights.ndim], weights.to(wide), values.to(wide)).to(values.dtype)
