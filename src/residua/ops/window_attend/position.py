"""Where a token stands: positions kept apart by document, and positions turned into rotations."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

FULL = 2**30
"""A window that holds every token of a document."""


def apart(positions: Int[Tensor, "*b t"], documents: Int[Tensor, "*b t"], window: int) -> Int[Tensor, "*b t"]:
    """Positions in which no window of `window` tokens reaches from one document into another; -1 for padding.

    positions: places of tokens in their own documents, below 2^30.
    documents: 0, 1, 2, ... in the order of the text; below zero is padding.
    A document begins at a multiple of the window, so that blocks of `mode=local` begin with it.
    """
    stride = -(-2 * FULL // window) * window
    return torch.where(documents < 0, -1, documents * stride + positions)


def rotations(positions: Int[Tensor, "*b t"], width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of p * base^(-2i/width), for halves of the head width."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
    angles = positions.to(wide)[..., None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "b head t e"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b head t e"]:
    """Rotate the pairs (x_i, x_{i + e/2}) by the angles of their positions, one row of them or one for every row."""
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
