"""Mixing a few neighbouring tokens inside a sublayer: the short convolution, and ShortSWA in its place.

A branch is what a projection of an attention sublayer gives, q, k or v; a local mixer stands between the two and starts
as the identity (Canon and ShortSWA) or as the activation alone (ShortConv).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.model.config import ModelConfig
from residua.model.context import Context
from residua.plan import Kinds

BTC = Float[Tensor, "b t c"]


class Started(nn.Module, ABC):
    """Parameters that start at values of their own, not at random."""

    @abstractmethod
    def start(self) -> None:
        """Put them there."""


def convolve(x: BTC, taps: Float[Tensor, "k c"], context: Context, slot: str) -> BTC:
    """sum_s taps_s x_{t-s} within a document; `slot` is where a cache keeps the last k - 1 tokens."""
    if context.mask is not None:
        x = x * context.mask[..., None].to(x.dtype)  # padding must not leak into the tokens after it
    kernel, tokens = len(taps), x.shape[1]
    history, at = context.history(x, kernel, slot)
    if context.cache is None:
        history, at = F.pad(x, (0, 0, kernel - 1, 0)), F.pad(at, (kernel - 1, 0), value=-1)
    taps = taps.to(x.dtype)
    if context.places is None:
        return ops.shortconv(x, history[:, : kernel - 1], taps)
    here = at[..., kernel - 1 :]
    total = taps[0] * x
    for back in range(1, kernel):
        there = slice(kernel - 1 - back, kernel - 1 - back + tokens)
        same = (here - at[..., there]).abs() < kernel
        total = total + taps[back] * history[:, there] * same[..., None].to(x.dtype)
    return total


LOCALS = Kinds()
"""The local mixers, by the kind of sublayer that each is inside a branch."""


class Local(Started):
    """A mixer of one branch of `heads` heads over the last `window` tokens."""

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        super().__init_subclass__()
        LOCALS.add(kind, cls)

    def __init__(self, config: ModelConfig, heads: int, head_width: int, window: int) -> None:
        super().__init__()
        self.window, self.head_width, self.width = window, head_width, heads * head_width

    @abstractmethod
    def forward(self, x: BTC, context: Context, slot: str) -> BTC: ...

    @abstractmethod
    def flops(self) -> float:
        """Floating-point operations per token."""

    def cache_floats(self) -> int:
        """Numbers that decoding keeps of one sequence."""
        return (self.window - 1) * self.width


class LocalCanon(Local, kind="canon"):
    """x_t + sum_s taps_s x_{t-s}; taps start at zero."""

    def __init__(self, config: ModelConfig, heads: int, head_width: int, window: int) -> None:
        super().__init__(config, heads, head_width, window)
        self.taps = nn.Parameter(torch.empty(window, self.width))

    def start(self) -> None:
        self.taps.zero_()

    def forward(self, x: BTC, context: Context, slot: str) -> BTC:
        return x + convolve(x, self.taps, context, slot)

    def flops(self) -> float:
        return 2 * self.taps.numel() + self.width


class LocalConv(LocalCanon, kind="conv"):
    """silu(sum_s taps_s x_{t-s}); the tap of the current token starts at 1 and the others at zero."""

    def start(self) -> None:
        self.taps.zero_()
        self.taps[0] = 1.0

    def forward(self, x: BTC, context: Context, slot: str) -> BTC:
        return F.silu(convolve(x, self.taps, context, slot))


class LocalSWA(Local, kind="swa"):
    """x_t + g (softmax_j(s n(x_t) . n(x_j) / sqrt(e) + b_(t-j)) x_j - x_t) over 0 <= t - j < window, by heads.

    n is the RMS norm. There are no projections: a scale s, a gate g and biases b a head are all it learns, and g starts
    at zero. (The author names the place and not the form; norm, scale and gate are ours.)
    """

    def __init__(self, config: ModelConfig, heads: int, head_width: int, window: int) -> None:
        super().__init__(config, heads, head_width, window)
        self.eps = config.eps
        self.gate = nn.Parameter(torch.empty(heads, 1, 1))
        self.scale = nn.Parameter(torch.empty(heads, 1, 1))
        self.bias = nn.Parameter(torch.empty(heads, window if config.causal else 2 * window - 1))

    def start(self) -> None:
        self.gate.zero_()
        self.scale.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: BTC, context: Context, slot: str) -> BTC:
        history, at = context.history(x, self.window, slot)
        heads = history.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        here = heads[:, :, heads.shape[2] - x.shape[1] :]
        key = F.rms_norm(heads, heads.shape[-1:], None, self.eps)
        query = self.scale.to(x.dtype) * key[:, :, key.shape[2] - x.shape[1] :]
        plain = context.places is None and context.cache is None
        mixed = ops.window_attend(
            query, key, heads, window=self.window, keys=None if plain else at, causal=context.causal, bias=self.bias
        )
        return (here + self.gate.to(x.dtype) * (mixed - here)).transpose(1, 2).flatten(-2)

    def flops(self) -> float:
        return (4 * self.window + 8) * self.width
