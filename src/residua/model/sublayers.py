"""The sequence axis: what may stand in a layout. A sublayer owns its norm and never sees the stream.

y = sublayer(*lanes, context)       lanes: (x,), or (q, k, v) for attention, already normalised
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.model.cache import Cache, Grown, Ring, Tail
from residua.model.config import ModelConfig
from residua.options import check_options
from residua.plan import Site, Slot


@dataclass(frozen=True, slots=True)
class Context:
    """What every sublayer of one forward shares."""

    positions: Int[Tensor, " t"]
    rotation: tuple[Float[Tensor, "t e"], Float[Tensor, "t e"]]
    """Cosines and sines of the rotary positions."""
    causal: bool
    mask: Bool[Tensor, "b t"] | None = None
    """True for tokens, False for padding."""
    cache: Cache | None = None


class LaneNorm(nn.Module):
    """x / rms(x) * gain for every lane: one gain for all, or one each."""

    def __init__(self, width: int, gains: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(gains, width))
        self.eps = eps

    def forward(self, *lanes: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t d"], ...]:
        gains = self.weight if len(self.weight) == len(lanes) else self.weight.expand(len(lanes), -1)
        return tuple(F.rms_norm(x, x.shape[-1:], gain, self.eps) for x, gain in zip(lanes, gains, strict=True))


class Sublayer(nn.Module, ABC):
    """A norm and a map from normalised lanes to what is written to the stream.

    The keyword-only arguments of a subclass's constructor are its options in a layout.
    """

    norm: LaneNorm

    def __init__(self, config: ModelConfig, site: Site, feeds: int) -> None:
        super().__init__()
        if feeds not in (1, site.lanes):
            raise ValueError(f"{config.design} feeds {site.name} {feeds} lanes, but it takes 1 or {site.lanes}")
        self.site = site
        self.norm = LaneNorm(config.width, feeds if config.lane_norms == "separate" else 1, config.eps)

    @abstractmethod
    def flops(self, tokens: int) -> float:
        """Floating-point operations per token in a sequence of `tokens`."""

    def cache_floats(self, tokens: int) -> int:
        """Numbers that decoding keeps after `tokens` tokens of one sequence."""
        return 0

    def writers(self) -> tuple[Tensor, ...]:
        """The parameters that make its output: their start is scaled with depth, or zero."""
        return ()


class Attention(Sublayer):
    """softmax(q k' / sqrt(e)) v over all earlier tokens (all tokens in an encoder), with rotary positions."""

    def __init__(self, config: ModelConfig, site: Site, feeds: int) -> None:
        super().__init__(config, site, feeds)
        self.head_width = config.width // config.heads
        shared = config.shared_heads * self.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, shared, bias=False)
        self.v = nn.Linear(config.width, shared, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = LaneNorm(self.head_width, 1, config.eps) if config.qk_norm else None
        self.k_norm = LaneNorm(self.head_width, 1, config.eps) if config.qk_norm else None

    def forward(self, x: Tensor, *kv: Tensor, context: Context) -> Float[Tensor, "b t d"]:
        key_input, value_input = kv or (x, x)
        q, k, v = (
            projection(lane).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection, lane in ((self.q, x), (self.k, key_input), (self.v, value_input))
        )
        if self.q_norm is not None and self.k_norm is not None:
            (q,), (k,) = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *context.rotation), rotate(k, *context.rotation)
        return self.o(self.attend(q, k, v, context).transpose(1, 2).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """The mixture over tokens."""
        before = 0
        if context.cache is not None:
            memory = context.cache.slot(self.site.name, Grown)
            before = memory.length
            k, v = memory.append(k, v)
        mask = None if context.mask is None else context.mask[:, None, None, :]
        whole = context.causal and not before and mask is None
        if context.causal and not whole and q.shape[2] > 1:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
            mask = seen if mask is None else seen & mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=True)

    def flops(self, tokens: int) -> float:
        matrices = sum(2 * m.weight.numel() for m in (self.q, self.k, self.v, self.o))
        return matrices + 4 * self.q.weight.shape[0] * self.span(tokens)

    def span(self, tokens: int) -> float:
        """Keys per query, on average."""
        return (tokens + 1) / 2

    def cache_floats(self, tokens: int) -> int:
        return 2 * self.k.weight.shape[0] * tokens

    def writers(self) -> tuple[Tensor, ...]:
        return (self.o.weight,)


class ShortSWA(Attention):
    """Attention over the last `window` tokens, the current one included: ShortSWA, the dual of a depth read.

    mode   sliding: the last `window` tokens; local: the tokens so far of the current block of `window`.
    start  zero: the output projection starts at zero, so that the sublayer starts as nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        site: Site,
        feeds: int,
        *,
        window: int = 16,
        mode: Literal["sliding", "local"] = "sliding",
        start: Literal["normal", "zero"] = "normal",
    ) -> None:
        super().__init__(config, site, feeds)
        if window < 1:
            raise ValueError(f"{site.name}: window={window} must be at least 1: it counts the current token")
        self.window, self.mode, self.zero = window, mode, start == "zero"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        keys = context.positions
        ring = None if context.cache is None else context.cache.slot(self.site.name, lambda: Ring(self.window))
        new = k, v, keys
        if ring is not None:
            k, v, keys = ring.extended(k, v, keys)
        if context.mask is not None:
            keys = torch.where(context.mask, keys, -1)
        y = ops.window_attend(
            q, k, v, window=self.window, mode=self.mode,
            queries=context.positions if keys.ndim == 1 else context.positions.expand_as(keys),
            keys=keys, causal=context.causal,
        )  # fmt: skip
        if ring is not None:
            ring.write(*new)
        return y

    def span(self, tokens: int) -> float:
        return min(self.window, tokens) if self.mode == "sliding" else (min(self.window, tokens) + 1) / 2

    def cache_floats(self, tokens: int) -> int:
        return super().cache_floats(self.window)


class MLP(Sublayer):
    """down(silu(gate x) * up x): SwiGLU."""

    def __init__(self, config: ModelConfig, site: Site, feeds: int) -> None:
        super().__init__(config, site, feeds)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, *, context: Context) -> Float[Tensor, "b t d"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def flops(self, tokens: int) -> float:
        return sum(2 * m.weight.numel() for m in (self.gate, self.up, self.down))

    def writers(self) -> tuple[Tensor, ...]:
        return (self.down.weight,)


class Canon(Sublayer):
    """y_t = sum_s taps_s x_{t-s}: a linear causal convolution per channel, added to the stream (Canon, 2512.17351)."""

    def __init__(
        self,
        config: ModelConfig,
        site: Site,
        feeds: int,
        *,
        kernel: int = 4,
        start: Literal["normal", "zero"] = "normal",
    ) -> None:
        super().__init__(config, site, feeds)
        if kernel < 1:
            raise ValueError(f"{site.name}: kernel={kernel} must be at least 1: it counts the current token")
        if not config.causal:
            raise ValueError(f"{site.name} is a causal convolution and has no place in an encoder; use attn or swa")
        self.zero = start == "zero"
        self.taps = nn.Parameter(torch.zeros(kernel, config.width))

    def forward(self, x: Tensor, *, context: Context) -> Float[Tensor, "b t d"]:
        if context.mask is not None:
            x = x * context.mask[..., None].to(x.dtype)  # padding must not leak into the tokens after it
        memory = None if context.cache is None else context.cache.slot(self.site.name, Tail)
        tail = x.new_zeros(x.shape[0], len(self.taps) - 1, x.shape[2]) if memory is None else memory.tail
        if tail is None:
            tail = x.new_zeros(x.shape[0], len(self.taps) - 1, x.shape[2])
        if memory is not None:
            memory.tail = ops.conv_tail(x, tail)
        return self.activate(ops.shortconv(x, tail, self.taps.to(x.dtype)))

    def activate(self, y: Tensor) -> Tensor:
        """Canon is linear."""
        return y

    def flops(self, tokens: int) -> float:
        return 2 * self.taps.numel()

    def cache_floats(self, tokens: int) -> int:
        return self.taps[1:].numel()

    def writers(self) -> tuple[Tensor, ...]:
        return (self.taps,)


class ShortConv(Canon):
    """y_t = silu(sum_s taps_s x_{t-s}): the short causal convolution of linear-attention and state-space blocks."""

    def activate(self, y: Tensor) -> Tensor:
        return F.silu(y)

    def flops(self, tokens: int) -> float:
        return super().flops(tokens) + self.taps.shape[1]


SUBLAYERS: dict[str, type[Sublayer]] = {
    "attn": Attention,
    "mlp": MLP,
    "swa": ShortSWA,
    "conv": ShortConv,
    "canon": Canon,
}


def make_sublayer(config: ModelConfig, site: Site, slot: Slot, feeds: int) -> Sublayer:
    """The sublayer of a site, with its layout options checked."""
    cls: Any = SUBLAYERS[slot.kind]
    try:
        check_options(cls, slot.options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layout item {slot}: {error}") from None
    return cls(config, site, feeds, **slot.options)


def rotations(positions: Int[Tensor, " t"], width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of p * base^(-2i/width), for halves of the head width."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
    angles = positions.to(wide)[:, None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "b head t e"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b head t e"]:
    """Rotate the pairs (x_i, x_{i + e/2}) by the angles of their positions."""
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
