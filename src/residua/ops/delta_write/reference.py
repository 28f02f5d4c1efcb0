"""The definition of `delta_write`."""

from __future__ import annotations

from torch import Tensor

from residua.ops.norm import accumulator, l2_norm


def delta_write(X: Tensor, k: Tensor, value: Tensor, beta: Tensor, *, eps: float) -> Tensor:
    """X + beta (v - X k) k', each row of X a value channel."""
    wide = accumulator(X.dtype)
    unit = l2_norm(k.to(wide), eps).unsqueeze(-2)
    held = (X.to(wide) * unit).sum(-1)
    step = beta.to(wide).unsqueeze(-1) * (value.to(wide) - held)
    return (X.to(wide) + step.unsqueeze(-1) * unit).to(X.dtype)
