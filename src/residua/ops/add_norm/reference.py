"""The definition of `add_norm`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from residua.ops.norm import accumulator


def add_norm(h: Tensor, y: Tensor, gain: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then norm what the sum was rounded to."""
    total = h + y
    wide = accumulator(total.dtype)
    gain = None if gain is None else gain.to(wide)
    return total, F.rms_norm(total.to(wide), total.shape[-1:], gain, eps).to(total.dtype)
