"""Multi-Gate Residuals: outputs are sources until there are n, and then each output moves every source towards it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parts import Part, constant, group_names, positive


class Pool(Part):
    """w_alpha, the query of a read."""

    query: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.add("query", (width,), constant(0.0))

    def scaled(self) -> Tensor:
        """w_alpha / sqrt(d): what `ops.attend` takes."""
        return self.query * len(self.query) ** -0.5


class Mixer(Part):
    """beta_i = sigmoid(w_beta . rmsnorm(s_i) / sqrt(d) + b): how far each stream moves to an output."""

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, eps: float, bias: float) -> None:
        super().__init__()
        self.eps = eps
        self.add("weight", (width,), constant(0.0))
        self.add("bias", (1,), constant(bias))

    def forward(self, streams: tuple[Tensor, ...]) -> Tensor:
        """[b t n]."""
        wide = torch.promote_types(accumulator(streams[0].dtype), self.weight.dtype)
        weight = self.weight.to(wide) * len(self.weight) ** -0.5
        scores = torch.stack([ops.rms_norm(one.to(wide), self.eps) @ weight for one in streams], -1)
        return (scores + self.bias).sigmoid()


@register("multigate")
class MultiGate(Stream[tuple[Tensor, ...]]):
    """x = sum_i softmax_i(w_a . rmsnorm(s_i) / sqrt(d)) s_i; s_i <- (1 - b_i) s_i + b_i f(norm(x)) over n streams.

    The embedding is the first stream, and outputs are appended until there are n; from then on every output moves all
    of them, by gates b_i = sigmoid(w_b . rmsnorm(s_i) / sqrt(d) + c). Queries w start at zero. With n > the number of
    sublayers nothing is gated, and it is `attnres` with 1 / sqrt(d) in its logits and no gain.

    streams   n.
    bias      where c starts; by default -ln(sqrt(L / 21)(e^3 + 1) - n), L the sublayers that gate, so that the more
              there are, the less each of them moves.
    eps       of the norms, which have no gain.

    From a third party's port, which has the gates that are independent of each other; the paper's competitive ones are
    not here.
    """

    paper = "arXiv 2605.23259 (from a port)"
    mixes = "n streams: outputs, and then gated means of them"
    cases = ("", "streams=2,eps=1e-5", "streams=3,bias=-1.0", "streams=99")
    conversion = Conversion(
        refusal="once all of its streams are there they are weighted means of outputs, so that no setting of its gates "
        "is the base network; train it from scratch"
    )

    def __init__(self, plan: Plan, *, streams: int = 4, bias: float | None = None, eps: float = 1e-6) -> None:
        super().__init__(plan)
        positive(self.name, streams=streams)
        if streams == 1:
            raise ValueError("multigate: with streams=1 there is nothing to choose from; give 2 or more")
        self.streams, self.eps = streams, eps
        gating = max(0, len(plan.sites) - streams + 1)
        start = self._bias(gating, streams) if bias is None and gating else bias or 0.0
        if bias is not None and not gating:
            raise ValueError(f"multigate: no output is gated with streams={streams}, and bias has no effect")

        def make(site: Site) -> nn.ModuleDict:
            parts = nn.ModuleDict()
            if site.index:
                parts["pool"] = Pool(plan.width)
            if self._gates(site):
                parts["mixer"] = Mixer(plan.width, eps, start)
            return parts

        self.each(make)

    @staticmethod
    def _bias(gating: int, streams: int) -> float:
        inner = math.sqrt(gating / 21) * (math.exp(3) + 1) - streams
        if inner <= 0:
            raise ValueError(
                f"multigate: {gating} gated outputs are too few for streams={streams} to set a bias; give one"
            )
        return -math.log(inner)

    def _gates(self, site: Site) -> bool:
        return site.kind != "head" and site.index + 1 >= self.streams

    @property
    def starts(self) -> Start:
        return "no" if self._gates(self.plan.sites[-1]) else "eps"

    def open(self, x: Tensor, past: Past = None) -> tuple[Tensor, ...]:
        return (x,)

    def read(self, s: tuple[Tensor, ...], site: Site, norm: Norm) -> Read:
        if not site.index:
            return Read(norm(s[0]))
        return Read(norm(ops.attend(self.part(site)["pool"].scaled(), s, eps=self.eps)))

    def write(self, s: tuple[Tensor, ...], site: Site, read: Read, y: Tensor) -> tuple[Tensor, ...]:
        if not self._gates(site):
            return (*s, y)
        betas = self.part(site)["mixer"](s).to(y.dtype).unbind(-1)
        return tuple(one + beta[..., None] * (y - one) for one, beta in zip(s, betas, strict=True))

    def gates(self, s: tuple[Tensor, ...], site: Site, read: Read) -> Mapping[str, Tensor]:
        return {"gate": self.part(site)["mixer"](s)} if self._gates(site) else {}

    def sources(self, site: Site) -> tuple[str, ...]:
        if not site.index:
            return ()
        if site.index < self.streams:  # nothing was gated yet
            return ("embed", *group_names(self.plan, 1, site.index))
        return tuple(f"stream{i}" for i in range(self.streams))

    def routing(self, s: tuple[Tensor, ...], site: Site) -> Routing | None:
        if not site.index:
            return None
        return Routing(s, ops.attend_weights(self.part(site)["pool"].scaled(), s, eps=self.eps)[None])
