"""Low-rank Attention Residuals: depth reads are routed by a few channels beside what they mix."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import OPEN, Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parts import Part, constant, group_names, group_size, normal

PROJECTING = ("attn", "swa", "mlp")
"""The kinds whose output projection can emit a key; others have a map of the design's."""


class Keyed(NamedTuple):
    """Sources with the key of each as their last channels."""

    done: tuple[Tensor, ...]
    """The embedding, then the sum of every finished block."""
    partial: tuple[Tensor, ...] = ()
    """The sum of the open block: none or one."""


class Asking(Part):
    """The query of a read, in the space of the keys."""

    query: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.add("query", (rank,), constant(0.0))


class Keying(Part):
    """A key for what no output projection made one for."""

    key: Tensor

    def __init__(self, rank: int, width: int) -> None:
        super().__init__()
        self.add("key", (rank, width), normal(0.02))

    def forward(self, x: Tensor) -> Tensor:
        """x with its key behind it."""
        return torch.cat([x, F.linear(x.to(self.key.dtype), self.key).to(x.dtype)], -1)


@register("lr_attnres")
class LowRankAttnRes(Stream[Keyed]):
    """x = sum_n softmax_n(q . rmsnorm(k_n) / sqrt(r) + log c_n) v_n, keys k of r channels over v = [e, o_0, o_1, ...].

    block=1: a source is one sublayer's output, and c = 1. block=k: a source is the mean of k outputs, c of them so far,
    with the sum of their keys, so that zero queries, which they start at, read the mean of all outputs: the standard
    network up to eps. The head reads too. The first site has one source and no query.

    rank    r, the channels of a key.
    key     projected: every output projection is r channels wider and emits the key (the embedding, and sublayers
            without an output projection, have a map of their own). sliced: the last r channels of the value are its
            key too, at no cost.
    block, blocks   as in `attnres`; the released code spreads a remainder over the blocks.
    eps     of the norm of the keys, which has no gain.
    """

    paper = "arXiv 2607.09694"
    mixes = "sublayer outputs, or means of blocks of them"
    cases = ("", "key=sliced,rank=3", "block=3,rank=4", "blocks=2,key=sliced,rank=3", "block=2,eps=1e-5")
    conversion = Conversion({"key": "sliced"}, eps=True)
    starts: Start = "eps"

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int | None = None,
        key: Literal["projected", "sliced"] = "projected",
        block: int | None = None,
        blocks: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        self.size = group_size(self.name, plan, block, blocks)
        self.rank, self.sliced, self.eps = min(32, plan.width) if rank is None else rank, key == "sliced", eps
        if self.rank < 1 or (self.sliced and self.rank > plan.width):
            raise ValueError(f"lr_attnres: rank={rank} must be at least 1, and with key=sliced at most the width")
        for site in plan.readers[1:]:
            self.at[site.name] = Asking(self.rank)
        self.keys = torch.nn.ModuleDict()
        if not self.sliced:
            self.keys["embed"] = Keying(self.rank, plan.width)
            for site in plan.sites:
                if not self.extra(site):
                    self.keys[site.name] = Keying(self.rank, plan.width)

    def extra(self, site: Site) -> int:
        return self.rank if not self.sliced and site.kind in PROJECTING else 0

    def open(self, x: Tensor, past: Past = None) -> Keyed:
        return Keyed((x if self.sliced else self.keys["embed"](x),))

    def read(self, s: Keyed, site: Site, norm: Norm) -> Read:
        values = self._values(s, site)
        return Read(norm(values[0] if len(values) == 1 else ops.mix(self._weights(s, site), values)))

    def write(self, s: Keyed, site: Site, read: Read, y: Tensor) -> Keyed:
        if site.name in self.keys:
            y = self.keys[site.name](y)
        y = s.partial[0] + y if s.partial else y
        closes = (site.index + 1) % self.size == 0
        return Keyed((*s.done, y)) if closes else Keyed(s.done, (y,))

    def sources(self, site: Site) -> tuple[str, ...]:
        if not site.index:
            return ()
        closed, inside = divmod(site.index, self.size)
        return ("embed", *group_names(self.plan, self.size, closed), *((OPEN,) if inside else ()))

    def routing(self, s: Keyed, site: Site) -> Routing | None:
        if not self.sources(site):
            return None
        return Routing(self._values(s, site), self._weights(s, site)[None, ..., None])

    def _counts(self, site: Site) -> list[int]:
        """Outputs in every source that a site reads."""
        closed, inside = divmod(site.index, self.size)
        return [1, *[self.size] * closed, *([inside] if inside else [])]

    def _values(self, s: Keyed, site: Site) -> tuple[Tensor, ...]:
        pairs = zip(s.done + s.partial, self._counts(site), strict=True)
        cut = [(source if self.sliced else source[..., : -self.rank], count) for source, count in pairs]
        return tuple(value if count == 1 else value / count for value, count in cut)

    def _weights(self, s: Keyed, site: Site) -> Tensor:
        """[n b t], in the accumulation type."""
        query = self.part(site).query
        logits = []
        for source, count in zip(s.done + s.partial, self._counts(site), strict=True):
            key = source[..., -self.rank :]
            key = ops.rms_norm(key.to(torch.promote_types(accumulator(key.dtype), query.dtype)), self.eps)
            logits.append(key @ (query.to(key.dtype) * self.rank**-0.5) + math.log(count))
        return torch.stack(logits).softmax(0)
