"""A norm that a design owns: of what a sublayer gives back, or of the stream itself."""

from __future__ import annotations

from torch import Tensor

from residua import ops
from residua.streams._parts import Part, constant


class Gain(Part):
    """x / sqrt(mean(x^2) + eps) * gain, in the type of x; the gain starts at 1."""

    gain: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.add("gain", (width,), constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.eps, self.gain.to(x.dtype))
