"""The definition of `normed_project`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from residua.ops.norm import accumulator, layer_norm
from residua.ops.rms_norm.reference import rms_norm


def normed_project(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, centered: bool = False) -> Tensor:
    """One after the other."""
    x, weight, bias = (one.to(accumulator(x.dtype)) for one in (x, weight, bias))
    return F.linear((layer_norm if centered else rms_norm)(x, eps), weight.T, bias)
