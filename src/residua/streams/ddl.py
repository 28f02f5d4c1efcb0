"""Deep Delta Learning: the shortcut itself is rewritten, along the direction that each sublayer points to."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Start, Stream
from residua.streams._parts import Part, constant, marked, normal, positive, projected


class Matrix(NamedTuple):
    """The state of every token, and what its convolutions saw of earlier tokens."""

    X: Tensor
    """[b t v d]: v value channels a token, each as wide as the stream."""
    past: tuple[Tensor, ...] = ()
    """The tokens before this pass, as each convolution needs them, in the order they run."""
    tails: tuple[Tensor, ...] = ()
    """The same for the tokens after this pass, one more at each read."""


class Taps(Part):
    """A causal convolution over tokens per channel, [k, v, d]; taps[0] weighs the current token."""

    taps: Tensor

    def __init__(self, kernel: int, channels: int, width: int, identity: bool) -> None:
        super().__init__()
        self.std = 0.0 if identity else 0.5 * width**-0.5
        self.add("taps", (kernel, channels, width), self._fill)

    def _fill(self, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.normal_(0.0, self.std, generator=generator)
        if not self.std:
            tensor[0] = 1.0


class Compress(Part, ABC):
    """x = sum_v read_v X_v, the [v, d] state as one [d] input; one per Transformer block, one for the head."""

    def forward(self, X: Tensor, tail: Tensor | None) -> Tensor:
        """tail: the tokens before, for a compressor that mixes them."""
        return ops.compress(self.weights(), X)

    @abstractmethod
    def weights(self) -> Tensor:
        """read [v, d]."""


class PerChannel(Compress):
    """x_i = sum_j W_ij X_ij: the paper's."""

    weight: Tensor

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.add("weight", (channels, width), constant(1 / channels))

    def weights(self) -> Tensor:
        return self.weight


class OverChannels(Compress):
    """A convolution over the channels, padded to keep their number, and then `pool`: the released code's.

    The taps reach half of their number back, or with `causal` all but one.
    """

    pool: Tensor
    taps: Tensor

    def __init__(self, channels: int, width: int, kernel: int, *, causal: bool, identity: bool) -> None:
        super().__init__()
        self.left = kernel - 1 if causal else (kernel - 1) // 2
        self.add("pool", (channels,), constant(1 / channels))
        # the identity is the tap that meets the channel itself: with it alone, the channels are averaged
        self.add("taps", (kernel, width), marked(1.0, self.left) if identity else normal(0.5 * width**-0.5))

    def weights(self) -> Tensor:
        zero, channels, kernel = self.taps.new_zeros(()), range(len(self.pool)), len(self.taps)
        met = [[(p, j - p + self.left) for p in channels if 0 <= j - p + self.left < kernel] for j in channels]
        return torch.stack([sum((self.pool[p] * self.taps[tap] for p, tap in each), start=zero) for each in met])


class OverTokens(Part):
    """A causal convolution over tokens, then the mean of the channels."""

    pool: Tensor

    def __init__(self, channels: int, width: int, kernel: int, *, identity: bool) -> None:
        super().__init__()
        self.add("pool", (channels,), constant(1 / channels))
        self.conv = Taps(kernel, channels, width, identity)

    def forward(self, X: Tensor, tail: Tensor | None) -> Tensor:
        assert tail is not None  # `DDL` keeps one for every convolution over tokens
        mixed = ops.shortconv(X, tail, self.conv.taps.to(X.dtype))
        return ops.compress(self.pool[:, None].expand(mixed.shape[-2:]), mixed)


def compressor(kind: str, kernel: int, channels: int, width: int, identity: bool) -> Compress | OverTokens:
    """The compressor of that name."""
    if kind == "channel":
        return PerChannel(channels, width)
    if kind == "token":
        return OverTokens(channels, width, kernel, identity=identity)
    return OverChannels(channels, width, kernel, causal=kind == "channel_causal", identity=identity)


class Rewrite(Part):
    """beta = 2 sigmoid(w . c + b) and the target v of one site."""

    beta_bias: Tensor
    beta: Tensor
    beta_in: Tensor  # this and its bias only with gate=mlp
    beta_in_bias: Tensor
    value: Tensor
    value_bias: Tensor  # only with value=released
    blend: Tensor  # only with start=standard

    def __init__(self, width: int, channels: int, value: str, gate: str, beta_init: float, blends: bool) -> None:
        super().__init__()
        self.value_kind, self.gate_kind = value, gate
        std = 0.5 * width**-0.5
        share = min(max(beta_init / 2, 1e-6), 1 - 1e-6)
        self.add("beta_bias", (1,), constant(math.log(share / (1 - share))))
        if gate == "linear":
            self.add("beta", (width,), normal(std))
        else:
            self.add("beta_in", (width, 128), normal(std))
            self.add("beta_in_bias", (128,), constant(0.0))
            self.add("beta", (128,), normal(std))
        self.add("value", (width, channels), normal(std))
        if value == "released":
            self.add("value_bias", (channels,), constant(0.0))
        if blends:
            self.add("blend", (1,), constant(0.0))

    def share(self, c: Tensor) -> Tensor:
        """beta in (0, 2), as [b t]."""
        wide = c.to(accumulator(c.dtype))
        if self.gate_kind == "mlp":
            wide = (wide @ self.beta_in.to(wide) + self.beta_in_bias).tanh()
        return self.bounded(wide @ self.beta.to(wide))

    def bounded(self, logit: Tensor) -> Tensor:
        """beta of w . c."""
        return 2 * (logit + self.beta_bias).sigmoid()

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """`share` and `target`; by one product where both are linear in c."""
        if self.gate_kind != "linear" or self.value_kind != "paper":
            return self.share(c), self.target(x, c)
        wide = c.to(accumulator(c.dtype))
        logit, target = projected(wide, (self.beta.to(wide), self.value.to(wide)))
        return self.bounded(logit.squeeze(-1)), target

    def target(self, x: Tensor, c: Tensor) -> Tensor:
        """v as [b t v]: linear in the normalised input, or 4 sigmoid of the raw one."""
        wide = accumulator(x.dtype)
        if self.value_kind == "paper":
            return c.to(wide) @ self.value.to(wide)
        return 4 * (x.to(wide) @ self.value.to(wide) + self.value_bias).sigmoid()


@register("ddl")
class DDL(Stream[Matrix]):
    """X <- X + beta k (v' - k'X), k = y / |y|, y = f(norm(x)): erase along k, then write v there.

    Every sublayer, attention and MLP alike, gives the direction k; beta in (0, 2) spans keeping (0), replacing (1)
    and reflecting (2). The size of y is forgotten. channels=1 is the plain stream, x = X.

    channels    d_v: value channels of the state. Above 1 a block compresses X to one input, with one compressor for
                all its sublayers and one for the head.
    compress    channel: x_i = sum_j W_ij X_ij (the paper). channel_same: a same-padded convolution over the channels
                and then a read vector (the released code; channel_causal: its causal setting). token: a causal
                convolution over tokens, then the mean;
                decoding keeps its last tokens as `past`.
    expand      repeat: every channel starts as the embedding; conv: through a causal convolution over tokens that
                starts as repeat.
    value       paper: v = W c, c the normalised input. released: v = 4 sigmoid(W x + b), x the raw input, never
                negative. Which of them made the published tables is not known.
    gate        linear: beta = 2 sigmoid(w . c + b); mlp: with a tanh layer of 128 (with the paper's inner bias).
    eps         k = y / sqrt(|y|^2 + eps^2): the gradient is finite where y = 0, and at most 1/eps.
    start       paper: beta starts at beta_init and the network is not the standard one. standard: the write is
                X + (1 - g) y + g (the write above), g = 0 at the start; unlike a target shifted to match the
                residual, this holds all of the design in its range (g = 1), for either value.

    Inits follow the released code: N(0, 0.25 / d) for matrices; the embedding's convolution is the identity.
    `compress=channel`, the paper's form, has no released start, and begins as the mean over channels.
    """

    paper = "arXiv 2601.00417"
    mixes = "nothing: the shortcut itself is rewritten"
    cases = (
        "",
        "value=released,beta_init=0.5",
        "gate=mlp,eps=1e-4",
        "start=standard",
        "channels=2",
        "channels=2,compress=channel,value=released,start=standard",
        "channels=4,compress=channel_same",
        "channels=4,compress=channel_same,start=standard",
        "channels=4,compress=channel_causal",
        "channels=2,compress=token,kernel=3",
        "channels=2,compress=token,expand=conv",
        "channels=3,compress=token,start=standard",
        "channels=2,expand=conv,value=released",
    )

    reads_direction = True
    conversion = Conversion({"start": "standard"}, exact=True)

    def __init__(
        self,
        plan: Plan,
        *,
        channels: int = 1,
        compress: Literal["channel", "channel_same", "token", "channel_causal"] | None = None,
        expand: Literal["repeat", "conv"] = "repeat",
        kernel: int = 4,
        value: Literal["paper", "released"] = "paper",
        gate: Literal["linear", "mlp"] = "linear",
        beta_init: float = 1.0,
        eps: float = 1e-5,
        start: Literal["paper", "standard"] = "paper",
    ) -> None:
        super().__init__(plan)
        positive(self.name, channels=channels, kernel=kernel)
        self.channels, self.kernel, self.eps, self.standard = channels, kernel, eps, start == "standard"
        self.compress = (compress or "channel") if channels > 1 else None
        self._refuse(compress, expand, beta_init)

        def make(site: Site) -> nn.ModuleDict:
            parts = nn.ModuleDict()
            if self.compress and site.first:
                parts["compress"] = compressor(self.compress, kernel, channels, plan.width, self.standard)
            if site.kind != "head":
                parts["rewrite"] = Rewrite(plan.width, channels, value, gate, beta_init, self.standard)
            return parts

        self.each(make)
        self.expand = Taps(kernel, channels, plan.width, identity=True) if expand == "conv" else None
        self._opening = {site.layer: site for site in plan.readers if site.first}

    @property
    def starts(self) -> Start:
        return "standard" if self.standard else "no"

    @property
    def mixes_tokens(self) -> bool:
        return self.expand is not None or self.compress == "token"

    def open(self, x: Tensor, past: Past = None) -> Matrix:
        past = past or self._blank(x)
        X = x.unsqueeze(2).expand(-1, -1, self.channels, -1)
        if self.expand is None:
            return Matrix(X, past)
        tail = past[0].unsqueeze(2).expand(-1, -1, self.channels, -1)  # one row of d serves every channel
        return Matrix(ops.shortconv(X, tail, self.expand.taps.to(x.dtype)), past, (ops.conv_tail(x, past[0]),))

    def read(self, s: Matrix, site: Site, norm: Norm) -> Read:
        x = self._compressed(s, site)
        (c,) = norm(x)
        return Read((c,), carry=(x, c))

    def write(self, s: Matrix, site: Site, read: Read, y: Tensor) -> Matrix:
        rewrite, (x, c) = self.part(site)["rewrite"], read.carry
        beta, value = rewrite(x, c)
        if self.standard:
            X = ops.delta_write(s.X, y, value, rewrite.blend * beta, eps=self.eps)
            X = X + ((1 - rewrite.blend) * y).to(y.dtype).unsqueeze(2)
        else:
            X = ops.delta_write(s.X, y, value, beta, eps=self.eps)
        return Matrix(X, s.past, self._tails(s))

    def past(self, s: Matrix) -> Past:
        return self._tails(s) or None

    def gates(self, s: Matrix, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        if part is None or "rewrite" not in part:
            return {}
        rewrite, (_, c) = part["rewrite"], read.carry
        blend = {"blend": rewrite.blend} if self.standard else {}  # it scales what beta does
        return {"beta": rewrite.share(c), **blend}

    def _compressed(self, s: Matrix, site: Site) -> Tensor:
        if self.compress is None:
            return s.X.squeeze(2)
        compress = self.part(self._opening[site.layer])["compress"]
        return compress(s.X, s.past[len(s.tails)] if self.compress == "token" else None)

    def _tails(self, s: Matrix) -> tuple[Tensor, ...]:
        """What this read's convolution leaves for the next tokens, after what the earlier ones left."""
        if self.compress != "token":
            return s.tails
        return (*s.tails, ops.conv_tail(s.X, s.past[len(s.tails)]))

    def _blank(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the convolutions of one pass see before the first token: zeros."""
        rows, before = x.shape[0], self.kernel - 1
        embed = (x.new_zeros(rows, before, x.shape[2]),) if self.expand is not None else ()
        reads = len(self.plan.readers) if self.compress == "token" else 0
        return (*embed, *(x.new_zeros(rows, before, self.channels, x.shape[2]) for _ in range(reads)))

    def _refuse(self, compress: str | None, expand: str, beta_init: float) -> None:
        if self.eps == 0:
            raise ValueError("ddl: eps=0 leaves a sublayer output of zero without a direction; the paper has 1e-5")
        if not 0 <= beta_init <= 2:
            raise ValueError(f"ddl: beta_init={beta_init} is outside 0 to 2, the range of the gate")
        if self.channels == 1 and (compress or expand == "conv"):
            raise ValueError("ddl: compress and expand act on several value channels; give channels=2 or more")
        uses_kernel = expand == "conv" or self.compress not in (None, "channel")
        if self.kernel != 4 and not uses_kernel:
            raise ValueError("ddl: kernel has no effect without compress=token, compress=channel_same or expand=conv")
        causal = self.compress == "channel_causal"
        reach = self.channels + (0 if causal else (self.kernel - 1) // 2)
        if self.compress in ("channel_same", "channel_causal") and self.kernel > reach:
            raise ValueError(f"ddl: kernel must be at most {reach} for {self.channels} channels, not {self.kernel}")
