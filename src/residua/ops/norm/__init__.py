"""Other norms that designs put on their sources, x / |x| and (x - mean) / std, and the type to add up in."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: float32 for narrower inputs, else the input's own."""
    return torch.promote_types(dtype, torch.float32)


def l2_norm(x: Float[Tensor, "*n d"], eps: float) -> Float[Tensor, "*n d"]:
    """x / sqrt(sum(x^2) + eps^2): finite, and with a finite gradient, where x = 0."""
    wide = x.to(accumulator(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps * eps).rsqrt()).to(x.dtype)


def layer_norm(x: Float[Tensor, "*n d"], eps: float) -> Float[Tensor, "*n d"]:
    """(x - mean(x)) / sqrt(var(x) + eps), the variance over d and not over d - 1."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)
