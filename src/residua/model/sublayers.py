"""The sequence axis: what may stand in a layout. A sublayer owns its norm and never sees the stream."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.model.cache import Grown, Ring
from residua.model.config import ModelConfig
from residua.model.context import Context as Context
from residua.model.local import LOCALS, Started, convolve
from residua.model.norms import LaneNorm, NoNorm, Placement
from residua.model.projection import Projection, matrices
from residua.model.sublayer import SUBLAYERS as SUBLAYERS
from residua.model.sublayer import Sublayer as Sublayer
from residua.ops.window_attend.position import FULL, rotate
from residua.ops.window_attend.reference import window_mask
from residua.plan import Site, Slot
from residua.stream import Answer, Stream, Values


class Heads(Sublayer):
    """softmax(q k' / sqrt(e)) v over tokens: the projections, heads and positions that all attention shares."""

    def __init__(self, config: ModelConfig, site: Site, feeds: int, heads: int, kv_heads: int, rotary: bool) -> None:
        super().__init__(config, site, feeds)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{site.name}: heads={heads} must be a multiple of kv_heads={kv_heads}, both at least 1")
        self.head_width, self.rotary = config.width // config.heads, rotary
        self.q: nn.Linear = Projection(config.width, heads * self.head_width)
        self.k: nn.Linear = Projection(config.width, kv_heads * self.head_width)
        self.v: nn.Linear | None = Projection(config.width, kv_heads * self.head_width)
        self.o: nn.Linear = Projection(heads * self.head_width, config.width)
        self.q_norm = LaneNorm(self.head_width, 1, config.eps) if config.qk_norm else None
        self.k_norm = LaneNorm(self.head_width, 1, config.eps) if config.qk_norm else None
        self.v_norm: LaneNorm | None = None
        self.shares = Values()

    def share(self, values: Values) -> None:
        """Hand projected values back, or make none, as a design wants it."""
        self.shares = values
        if not values.made:
            self.v = None

    def widen(self, extra: int) -> None:
        self.o = Projection(self.o.in_features, self.o.out_features + extra)

    def forward(
        self, x: Tensor, *kv: Tensor, context: Context, values: tuple[Tensor, ...] = ()
    ) -> Float[Tensor, "b t d"] | Answer:
        key_input, value_input = kv or (x, x)
        q = self.branch("q", self.q(x), context)
        k = self.branch("k", self.k(key_input), context)
        own = None if self.v is None else self.branch("v", self.v(value_input), context)
        v = own
        if values:
            scale, shift = (each.to(q.dtype) for each in values)
            v = shift if own is None else own * _a_head(scale, self.head_width) + shift
        assert v is not None  # a design that wants none made gives them
        q, k, v = self._normed(self.q_norm, q), self._normed(self.k_norm, k), self._normed(self.v_norm, v)
        y: Tensor = self.o(self.mixed(q, k, v, context))
        return y if own is None or not self.shares.kept else Answer(y, own)

    def _normed(self, norm: LaneNorm | None, x: Tensor) -> Tensor:
        """Every head normalised, where there is a norm of heads."""
        return x if norm is None else norm(x.unflatten(-1, (-1, self.head_width)))[0].flatten(-2)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Float[Tensor, "b t c"]:
        """The mixture of projections, whose heads lie side by side before and after."""
        q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (q, k, v))
        if self.rotary:
            q, k = rotate(q, *context.rotation), rotate(k, *context.rotation)
        return self.attend(q, k, v, context).transpose(1, 2).flatten(-2)

    def branch(self, name: str, x: Tensor, context: Context) -> Tensor:
        """What stands between a projection and its heads: nothing, unless a subclass says so."""
        return x

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """The mixture over tokens."""

    @abstractmethod
    def span(self, tokens: int) -> float:
        """Keys per query, on average."""

    def flops(self, tokens: int) -> float:
        matrices = sum(2 * m.weight.numel() for m in (self.q, self.k, self.v, self.o) if m is not None)
        return matrices + 4 * self.q.weight.shape[0] * self.span(tokens)

    def cache_floats(self, tokens: int) -> int:
        return 2 * self.k.weight.shape[0] * tokens

    def writers(self) -> tuple[Tensor, ...]:
        return (self.o.weight,)


def _a_head(scale: Tensor, width: int) -> Tensor:
    """One number a head, for every channel of it."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(width, -1)


class Attention(Heads, kind="attn"):
    """softmax(q k' / sqrt(e)) v over all earlier tokens (all tokens in an encoder), with rotary positions.

    local   swa, conv, canon: q, k and v each mix with the tokens just before, between their projection and their
            heads, in the place that linear-attention blocks give to a short convolution.
    window  tokens that `local` mixes, the current one included.
    heads_norm  none; qk, qkv: an RMS norm of every head of these (`qk_norm` of the model does qk everywhere).
    """

    def __init__(
        self,
        config: ModelConfig,
        site: Site,
        feeds: int,
        *,
        local: Literal["none", "swa", "conv", "canon"] = "none",
        window: int = 4,
        heads_norm: Literal["none", "qk", "qkv"] = "none",
    ) -> None:
        super().__init__(config, site, feeds, config.heads, config.shared_heads, rotary=True)
        if heads_norm != "none" and self.q_norm is None:
            self.q_norm, self.k_norm = (LaneNorm(self.head_width, 1, config.eps) for _ in range(2))
        if heads_norm == "qkv":
            self.v_norm = LaneNorm(self.head_width, 1, config.eps)
        if window < 1:
            raise ValueError(f"{site.name}: window={window} must be at least 1: it counts the current token")
        if local in ("conv", "canon") and not config.causal:
            raise ValueError(f"{site.name}: local={local} is a causal convolution; an encoder takes local=swa or none")
        if local == "swa" and window == 1:
            raise ValueError(f"{site.name}: local=swa over one token is that token; give window=2 or more")
        heads = {"q": config.heads, "k": config.shared_heads, "v": config.shared_heads}
        self.local: Any = nn.ModuleDict(
            {} if local == "none" else {
                name: LOCALS[local](config, count, self.head_width, window) for name, count in heads.items()
            }
        )  # fmt: skip

    def forward(
        self, x: Tensor, *kv: Tensor, context: Context, values: tuple[Tensor, ...] = ()
    ) -> Float[Tensor, "b t d"] | Answer:
        weights: tuple[Tensor, ...] = ()
        if self._steps(x, context) and not (values or self.shares.kept or self.local or self.q_norm or self.v_norm):
            weights = matrices(self.q, self.k, self.v, self.o)
        if weights:
            place = self._place(x, weights[1].shape[0], context)
            return ops.attention_step((x, *kv), weights, context.rotation if self.rotary else None, *place)
        return super().forward(x, *kv, context=context, values=values)

    def _steps(self, x: Tensor, context: Context) -> bool:
        """Whether these are single tokens, each after those of its row in a cache."""
        return context.cache is not None and context.places is None and x.shape[1] == 1

    def _place(self, like: Tensor, width: int, context: Context) -> tuple[Tensor, Tensor, int]:
        """Where a token's keys and values of `width` channels go."""
        assert context.cache is not None
        memory = context.cache.slot(context.slot(self.site.name), Grown)
        return memory.place(like, width // self.head_width, self.head_width)

    def branch(self, name: str, x: Tensor, context: Context) -> Tensor:
        if name not in self.local:
            return x
        mixed: Tensor = self.local[name](x, context, f"{self.site.name}.{name}")
        return mixed

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Float[Tensor, "b t c"]:
        rotation = context.rotation if self.rotary else None
        if context.cache is None and context.places is None:
            return ops.token_attend(q, k, v, rotation, width=self.head_width, causal=context.causal)
        if self._steps(q, context):
            return ops.cached_attend(q, k, v, rotation, *self._place(k, k.shape[-1], context))
        return super().mixed(q, k, v, context)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """With places, or with a cache, which encoders refuse: without either `mixed` has called the op."""
        before, here = 0, None if context.places is None else context.apart(FULL)
        keys = here
        if context.cache is not None:
            memory = context.cache.slot(context.slot(self.site.name), Grown)
            before = memory.length
            k, v, keys = memory.append(k, v, here)
        if here is not None and keys is not None:
            seen = window_mask(here, keys, window=FULL, mode="sliding", causal=context.causal)[:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        mask = None
        if before and q.shape[2] > 1:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not before, enable_gqa=True)

    def span(self, tokens: int) -> float:
        return (tokens + 1) / 2

    def flops(self, tokens: int) -> float:
        return super().flops(tokens) + sum(one.flops() for one in self.local.values())

    def cache_floats(self, tokens: int) -> int:
        return super().cache_floats(tokens) + sum(one.cache_floats() for one in self.local.values())


class RelativeBias(Started):
    """b_(t-j), one a head and distance, added to the logits; starts at zero."""

    def __init__(self, heads: int, distances: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, distances))

    def start(self) -> None:
        self.weight.zero_()


class ShortSWA(Heads, kind="swa"):
    """Attention over the last `window` tokens, the current one included: ShortSWA, the dual of a depth read.

    mode      sliding: the last `window` tokens; local: the tokens so far of the current block of `window`.
    position  rotary, as in `attn`; bias: a learned number a head and distance, which makes a softmax-normalised
              short convolution a special case (W_Q = 0); none.
    heads, kv_heads  fewer heads than the model's make it narrow: 4 d d_a parameters where full width has 4 d^2.
    start     zero: the output projection starts at zero, so that the sublayer starts as nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        site: Site,
        feeds: int,
        *,
        window: int = 16,
        mode: Literal["sliding", "local"] = "sliding",
        position: Literal["rotary", "bias", "none"] = "rotary",
        heads: int | None = None,
        kv_heads: int | None = None,
        start: Literal["normal", "zero"] = "normal",
    ) -> None:
        heads = config.heads if heads is None else heads
        shared = min(config.shared_heads, heads) if kv_heads is None else kv_heads
        super().__init__(config, site, feeds, heads, shared, rotary=position == "rotary")
        if window < 1:
            raise ValueError(f"{site.name}: window={window} must be at least 1: it counts the current token")
        if position == "bias" and window == 1:
            raise ValueError(f"{site.name}: position=bias over one token has nothing to weigh; give window=2 or more")
        self.window, self.mode, self.zero = window, mode, start == "zero"
        distances = window if config.causal else 2 * window - 1
        self.bias = RelativeBias(heads, distances) if position == "bias" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        at = context.apart(self.window)
        keys: Tensor | None = at
        queries = None
        if context.cache is not None:
            margin = context.cache.margin
            ring = context.cache.slot(context.slot(self.site.name), lambda: Ring(self.window, margin))
            if q.shape[2] == 1:
                queries, (k, v, keys) = at, ring.write(k, v, at)
            else:
                new = k, v, at
                k, v, keys = ring.extended(*new)
                ring.write(*new)
        if queries is None and at.ndim == 1 and (self.mode == "sliding" or k.shape[2] == context.length):
            keys = None  # consecutive, and counted from 0 where that matters
        return ops.window_attend(
            q, k, v, window=self.window, mode=self.mode, queries=queries, keys=keys, causal=context.causal,
            bias=None if self.bias is None else self.bias.weight,
        )  # fmt: skip

    def span(self, tokens: int) -> float:
        return min(self.window, tokens) if self.mode == "sliding" else (min(self.window, tokens) + 1) / 2

    def cache_floats(self, tokens: int) -> int:
        return super().cache_floats(self.window)


class MLP(Sublayer, kind="mlp"):
    """down(silu(gate x) * up x): SwiGLU."""

    def __init__(self, config: ModelConfig, site: Site, feeds: int) -> None:
        super().__init__(config, site, feeds)
        self.gate = Projection(config.width, config.hidden)
        self.up = Projection(config.width, config.hidden)
        self.down = Projection(config.hidden, config.width)

    def widen(self, extra: int) -> None:
        self.down = Projection(self.down.in_features, self.down.out_features + extra)

    def forward(self, x: Tensor, *, context: Context) -> Float[Tensor, "b t d"]:
        if weights := matrices(self.gate, self.up, self.down):
            return ops.gated_mlp(x, *weights)
        return self.down(ops.swiglu(self.gate(x), self.up(x)))

    def flops(self, tokens: int) -> float:
        return sum(2 * m.weight.numel() for m in (self.gate, self.up, self.down))

    def writers(self) -> tuple[Tensor, ...]:
        return (self.down.weight,)


class Canon(Sublayer, kind="canon"):
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
        return self.activate(convolve(x, self.taps, context, self.site.name))

    def activate(self, y: Tensor) -> Tensor:
        """Canon is linear."""
        return y

    def flops(self, tokens: int) -> float:
        return 2 * self.taps.numel()

    def cache_floats(self, tokens: int) -> int:
        return self.taps[1:].numel()

    def writers(self) -> tuple[Tensor, ...]:
        return (self.taps,)


class ShortConv(Canon, kind="conv"):
    """y_t = silu(sum_s taps_s x_{t-s}): the short causal convolution of linear-attention and state-space blocks."""

    def activate(self, y: Tensor) -> Tensor:
        return F.silu(y)

    def flops(self, tokens: int) -> float:
        return super().flops(tokens) + self.taps.shape[1]


def make_sublayer(config: ModelConfig, site: Site, slot: Slot, stream: Stream) -> Sublayer:
    """The sublayer of a site, with its layout options checked, as the design wants it."""
    slot, placement = Placement.split(slot)
    feeds = stream.feeds(site)
    if site.block is not None:  # a block that runs again may be fed more lanes then
        same = (site.block, site.kind, site.turn)
        feeds = max(stream.feeds(each) for each in stream.plan.sites if (each.block, each.kind, each.turn) == same)
    made: Sublayer = SUBLAYERS.of(slot)(config, site, feeds, **slot.options)
    made.norm = placement.norm(made.norm, site) if stream.takes_norm(site) else NoNorm()  # type: ignore[arg-type]
    if placement.behind:
        made.out_norm = LaneNorm(config.width, 1, config.eps)
    if stream.values(site) != Values():
        made.share(stream.values(site))
    if stream.extra(site):
        if placement.behind:
            raise ValueError(f"{stream.spec} takes more channels than the width from {site.name}; use norm=pre")
        made.widen(stream.extra(site))
    return made
