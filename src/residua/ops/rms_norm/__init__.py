"""x / sqrt(mean(x^2) + eps), times a gain where there is one: the norm of sublayers, heads and sources."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.rms_norm import native as _native  # noqa: F401  registers the kernel
from residua.ops.rms_norm import reference


def rms_norm(x: Float[Tensor, "*n d"], eps: float, gain: Float[Tensor, " d"] | None = None) -> Float[Tensor, "*n d"]:
    """Of every row; sums in float32 for narrower types."""
    return run("rms_norm", x, reference.rms_norm, x, eps, gain)
