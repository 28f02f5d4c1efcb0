"""y[t] = sum_s taps[s] x[t - s]: a short causal convolution over tokens, one filter a channel."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.shortconv import native as _native  # noqa: F401  registers the kernel
from residua.ops.shortconv import reference


def shortconv(
    x: Float[Tensor, "b t *c"], tail: Float[Tensor, "b k1 *c"], taps: Float[Tensor, "k *c"]
) -> Float[Tensor, "b t *c"]:
    """`taps[0]` weighs the current token; `tail` holds the k - 1 tokens before `x`, zeros at the start."""
    return run("shortconv", x, reference.shortconv, x, tail, taps)


def conv_tail(x: Float[Tensor, "b t *c"], tail: Float[Tensor, "b k1 *c"]) -> Float[Tensor, "b k1 *c"]:
    """The tail that the tokens after `x` need: always k - 1 long, however short `x` is."""
    return torch.cat([tail, x], 1)[:, x.shape[1] :]
