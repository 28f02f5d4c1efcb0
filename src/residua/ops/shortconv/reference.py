"""The definition of `shortconv`."""

from __future__ import annotations

import torch
from torch import Tensor


def shortconv(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    """One shifted, weighted copy of the tokens per tap."""
    tokens, kernel = x.shape[1], taps.shape[0]
    history = torch.cat([tail, x], 1)
    shifted = [taps[s] * history[:, kernel - 1 - s : kernel - 1 - s + tokens] for s in range(kernel)]
    return torch.stack(shifted).sum(0)
