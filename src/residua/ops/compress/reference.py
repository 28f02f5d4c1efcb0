"""The definition of `compress`."""

from __future__ import annotations

from torch import Tensor

from residua.ops.norm import accumulator


def compress(weights: Tensor, X: Tensor) -> Tensor:
    """A product and a sum over the channels."""
    wide = accumulator(X.dtype)
    return (X.to(wide) * weights.to(wide)).sum(-2).to(X.dtype)
