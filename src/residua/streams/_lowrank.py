"""What Gemma 3n adds to the stream of an attention: LAuReL in the form that it ships."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from residua.streams._parts import Part, constant, normal


class ShippedLaurel(Part):
    """u + rmsnorm(W_r W_l u), u the normalised input of the attention."""

    left: Tensor
    right: Tensor
    gain: Tensor

    def __init__(self, width: int, rank: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.add("left", (rank, width), normal(0.02))
        self.add("right", (width, rank), normal(0.02))
        self.add("gain", (width,), constant(1.0))

    def forward(self, u: Tensor) -> Tensor:
        low = F.linear(F.linear(u.to(self.left.dtype), self.left), self.right).to(
            self.gain.dtype
        )  # autocast narrows it
        return u + F.rms_norm(low, low.shape[-1:], self.gain, self.eps).to(u.dtype)

    def write(self, x: Tensor, u: Tensor, y: Tensor) -> Tensor:
        """(x + y + laurel(u)) / sqrt(2), the stream after an attention that read u and answered y."""
        return (x + y + self(u)) / math.sqrt(2)
