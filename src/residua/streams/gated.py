"""The gated residual of Qwen: parallel streams whose read is a gate on every channel, and owns its norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Read, Routing, Start
from residua.streams._parallel import ParallelStream, names
from residua.streams._parts import Part, constant, normal, positive

STD = 0.02
"""Of the maps at the start."""


class Mixed(NamedTuple):
    """What one read is made from: N and G [b t n d], and s [b t n], none at the head."""

    normed: Tensor
    gates: Tensor
    inject: Tensor | None


class GatedRead(Part):
    """N, G and s of one site."""

    gain: Tensor
    down: Tensor
    up: Tensor
    inject: Tensor  # not at the head

    def __init__(self, width: int, streams: int, rank: int, eps: float, *, writes: bool) -> None:
        super().__init__()
        self.eps, self.writes = eps, writes
        self.add("gain", (streams, width), constant(0.0))
        self.add("down", (rank, streams * width), normal(STD))
        self.add("up", (streams * width, rank), normal(STD))
        if writes:
            self.add("inject", (streams, streams * width), normal(STD))

    def forward(self, R: Tensor) -> Mixed:
        wide, streams = accumulator(R.dtype), R.shape[-2]
        normed = (ops.rms_norm(R.to(wide), self.eps) * (1 + self.gain.to(wide))).to(R.dtype)
        flat = normed.flatten(-2).to(self.down.dtype)
        hidden = F.silu(F.linear(flat, self.down) / streams)
        gates = F.linear(hidden, self.up).sigmoid().unflatten(-1, R.shape[-2:])
        return Mixed(normed, gates, 2 * (F.linear(flat, self.inject) / streams).sigmoid() if self.writes else None)


@register("gated")
class Gated(ParallelStream):
    """x = mean_i G_i * N_i; R_i <- R_i + s_i f(x), N_i = (1 + w_i) R_i / rms(R_i), over n streams R_i [d].

    G = sigmoid(W_up silu(W_down vec(N) / n)) has a gate for every stream and channel, s = 2 sigmoid(W_s vec(N) / n) one
    for every stream. x is the sublayer's input: no norm follows, and none follows the head, which reads likewise.
    The streams begin as copies of the embedding. Qwen3.8-Flash-Next has 4 of them and rank d/8.

    rank   of the maps to G; d/8 where not given, at least 1.
    eps    of the norm of every stream.

    w starts at 0 and the maps at N(0, 0.02^2). With maps of zero, G = 1/2 and s = 1: the standard network with half its
    gains, whose streams would stay equal for ever.
    """

    paper = "arXiv 2608.30320"
    released_in: ClassVar = {"Qwen3.8-Flash-Next": "gated:rank=320"}
    conversion = Conversion(
        refusal="it normalises what it reads by itself and leaves no place for the norms of the network, whose trained "
        "gains would be lost; train it from scratch"
    )
    cases = ("", "streams=2,rank=3", "eps=1e-5")

    def __init__(self, plan: Plan, *, streams: int = 4, rank: int | None = None, eps: float = 1e-6) -> None:
        super().__init__(plan)
        rank = max(1, plan.width // 8) if rank is None else rank
        positive(self.name, streams=streams, rank=rank)
        self.streams = streams
        self.each(lambda site: GatedRead(plan.width, streams, rank, eps, writes=site.kind != "head"))

    @property
    def starts(self) -> Start:
        return "no"

    def takes_norm(self, site: Site) -> bool:
        return False

    def read(self, R: Tensor, site: Site, norm: Norm) -> Read:
        normed, gates, inject = self.part(site)(R)
        x = (gates.to(normed.dtype) * normed).mean(-2)
        return Read((x,), carry=() if inject is None else (R, inject))

    def sources(self, site: Site) -> tuple[str, ...]:
        return names(self.streams)

    def routing(self, R: Tensor, site: Site) -> Routing:
        """The normed streams are mixed, each channel with weights of its own."""
        normed, gates, _ = self.part(site)(R)
        return Routing(normed.unbind(-2), (gates / self.streams).movedim(-2, 0)[None])

    def gates(self, R: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        return {"inject": read.carry[1]} if read.carry else {}
