"""The definition of `unembed_loss`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from residua.ops.norm import accumulator


def unembed_loss(x: Tensor, weight: Tensor, targets: Tensor, *, ignored: int = -100) -> Tensor:
    """The logits of all rows, and PyTorch's cross entropy."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(accumulator(logits.dtype)), targets, ignore_index=ignored, reduction="sum")
