"""The definition of `swiglu`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's silu, and a product."""
    return F.silu(a) * b
