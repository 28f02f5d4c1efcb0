"""Delta Attention Residuals: the stream is kept, and every sublayer also reads a routed mixture of its changes."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Norm, Past, Read, Routing, Start, Stream
from residua.streams._ahead import Ahead
from residua.streams._parts import Part, Query, constant, group_names, group_size


class Deltas(NamedTuple):
    """The stream and what it is made of."""

    h: Tensor
    sources: tuple[Tensor, ...]
    """The embedding, then the change made by every finished block."""
    partial: tuple[Tensor, ...] = ()
    """The change of the open block so far: none or one."""
    ahead: Ahead = Ahead()


class Gate(Part):
    """g in x = h + g r: 1, a sigmoid scalar or vector that starts at sigmoid(-2), or a plain scalar from 0."""

    logit: Tensor  # of a scalar
    weight: Tensor  # of a vector, as is the bias
    bias: Tensor
    alpha: Tensor  # of a plain scalar

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scalar":
            self.add("logit", (1,), constant(-2.0))  # one entry and not zero axes: sharding needs an axis
        elif kind == "vector":
            self.add("weight", (width, width), constant(0.0))
            self.add("bias", (width,), constant(-2.0))
        elif kind == "alpha":
            self.add("alpha", (1,), constant(0.0))

    def forward(self, h: Tensor) -> Tensor | float:
        if self.kind == "vector":
            return F.linear(h.to(self.weight.dtype), self.weight, self.bias).sigmoid().to(h.dtype)
        return 1.0 if self.kind == "none" else self.number().to(h.dtype)

    def number(self) -> Tensor:
        """The gate of a kind that does not depend on h."""
        return self.alpha if self.kind == "alpha" else self.logit.sigmoid()

    def onto(self, h: Tensor, r: Tensor) -> Tensor:
        """h + g r."""
        return h + (r if self.kind == "none" else self.forward(h) * r)


class Null(Part):
    """The choice to take nothing: a logit whose value is zero, or a vector among the sources; empty without it."""

    logit: Tensor
    vector: Tensor

    def __init__(self, kind: Literal["none", "logit", "vector"], width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "logit":
            self.add("logit", (1,), constant(0.0))
        elif kind == "vector":
            self.add("vector", (width,), constant(0.0))

    @property
    def asked(self) -> Tensor | None:
        """The logit, where the null is one."""
        return self.logit if self.kind == "logit" else None


class How(TypedDict):
    """The keywords of `ops.attend` that this design sets."""

    eps: float
    null: Tensor | None
    centered: bool


class Route(nn.Module):
    """One routed read: query, optional null, gate."""

    def __init__(self, width: int, sources: int, null: Literal["none", "logit", "vector"], gate: str) -> None:
        super().__init__()
        choices = sources + (null != "none")
        # One source needs no query. Under alpha = 0 a zero query would sit on a saddle: its read is a multiple of h,
        # which the norm forgets, so that alpha has no gradient, and without alpha the query has none.
        self.query = Query(width, std=0.02 if gate == "alpha" else 0.0) if choices > 1 else None
        self.null = Null(null, width)
        self.gate = Gate(gate, width)


@register("delta")
class Delta(Stream[Deltas]):
    """x = h + g sum_n softmax_n(w . rmsnorm(d_n)) d_n, h <- h + f(norm(x)) over d = [e, o_0, o_1, ...].

    Only the input is enriched: the stream never contains the read, and the head reads the plain stream. A source
    is one sublayer's output, or the sum of a block's (block=k, blocks=n): a true block delta, added up and never
    found by subtracting streams, which loses it in bfloat16. The first site reads the plain stream, as released.

    include_partial  inside a block, its change so far is a source too; with zero queries the design is then the
                     standard network. The paper pushes a block when it ends, so the default is off.
    gate             none | scalar | vector | alpha; alpha starts at 0, exactly the standard network, and its queries
                     at N(0, 0.02^2): with zero queries too, neither would receive a gradient.
    null             one more logit whose value is zero, so that a site may take nothing. (The released code
                     routes to a learned vector through the key norm, whose slope at zero is 1/sqrt(eps).)
    value_lane       attention takes v from a read of its own.
    centered         weights are softmax - 1/n: a read can suppress, and zero queries add nothing.
    compat=released  the public code, for its checkpoints: a block source is h minus the previous *source* (a true
                     delta only up to the second), pushed after the first sublayer of a block's first layer has
                     read; null is a vector among the sources.
    """

    paper = "arXiv 2605.18855"
    mixes = "sublayer outputs, or sums of blocks of them"
    cases = (
        "",
        "block=2",
        "blocks=2,include_partial=true",
        "blocks=2,gate=alpha",
        "gate=scalar",
        "gate=vector,block=3",
        "gate=alpha",
        "null=true,eps=1e-5",
        "null=true,gate=alpha,blocks=2",
        "value_lane=true",
        "value_lane=true,null=true,gate=scalar",
        "centered=true",
        "centered=true,gate=scalar,blocks=2",
        "centered=true,gate=alpha",
        "compat=released",
        "compat=released,blocks=3",
        "compat=released,blocks=3,null=true,gate=vector",
        "compat=released,null=true",
    )
    refuses: ClassVar = {
        "total": "its read is added to the stream, which already holds the sum; use gate or centered",
        "heads": "its paper routes the whole width at once; attnres:heads=... splits it",
    }

    def __init__(
        self,
        plan: Plan,
        *,
        block: int | None = None,
        blocks: int | None = None,
        include_partial: bool = False,
        gate: Literal["none", "scalar", "vector", "alpha"] = "none",
        null: bool = False,
        value_lane: bool = False,
        centered: bool = False,
        compat: Literal["none", "released"] = "none",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        self.size = group_size(self.name, plan, block, blocks)
        self.include_partial, self.centered, self.eps = include_partial, centered, eps
        self.released = compat == "released"
        self.span = self._layers_a_block(plan, block, blocks) if self.released else 0
        self.gated_ahead = gate != "vector"  # which depends on h
        self._refuse(gate, null, value_lane)
        kind: Literal["none", "logit", "vector"] = "none" if not null else "vector" if self.released else "logit"

        def routes(site: Site) -> nn.ModuleList | None:
            count = len(self._names(site))
            if site.kind == "head" or count + (kind == "vector") == 0 or (centered and count == 1):
                return None
            lanes = 2 if value_lane and site.lanes == 3 else 1
            return nn.ModuleList(Route(plan.width, count, kind, gate) for _ in range(lanes))

        self.each(routes)

    @property
    def starts(self) -> Start:
        if self.centered or self.options["gate"] == "alpha":
            return "standard"
        return "no" if self.span or not (self.size == 1 or self.include_partial) else "eps"

    def feeds(self, site: Site) -> int:
        part = self.part(site)
        return 3 if part is not None and len(part) == 2 else 1

    def open(self, x: Tensor, past: Past = None) -> Deltas:
        return Deltas(x, (x,))

    def read(self, s: Deltas, site: Site, norm: Norm) -> Read:
        part = self.part(site)
        if part is None:
            return Read(norm(s.h))
        lanes, ready = [], s.ahead.complete
        for place, route in enumerate(part._modules.values()):  # as `part`: a token comes by at every site
            if ready:
                lanes.append(s.h + ready[place] if self.gated_ahead else route.gate.onto(s.h, ready[place]))
            else:
                lanes.append(self._enriched(route, s, site, place))
        return Read(norm(*lanes) if len(lanes) == 1 else norm(lanes[0], *lanes))

    def write(self, s: Deltas, site: Site, read: Read, y: Tensor) -> Deltas:
        if self.span:
            return self._write_released(s, site, y)
        change = s.partial[0] + y if s.partial else y
        closes = (site.index + 1) % self.size == 0
        sources, partial, ahead = (
            ((*s.sources, change), (), s.ahead.pushed(change)) if closes else (s.sources, (change,), s.ahead)
        )
        if not (self.centered or self.released):  # what a group cannot serve: a mean taken away, a null vector
            part = self.part(site)
            used = 0 if part is None else len(part._modules)
            ahead, sources = ahead.onward(
                sources,
                used,
                lambda most: self._coming(site, most),
                eps=self.eps,
                final=self.size > 1 and not self.include_partial,
            )
        return Deltas(s.h + y, sources, partial, ahead)

    def sources(self, site: Site) -> tuple[str, ...]:
        part = self.part(site)
        if part is None:
            return ()
        return (("null",) if part[0].null.kind == "vector" else ()) + self._names(site)

    def routing(self, s: Deltas, site: Site) -> Routing | None:
        part = self.part(site)
        if part is None:
            return None
        values = self._values(part[0], s, site)
        each = [self._weights(route, self._values(route, s, site)) for route in part]
        lanes = [each[0], each[0], each[1]] if len(each) == 2 else each
        gates = [torch.as_tensor(route.gate(s.h)).to(s.h) for route in part]
        gates = [gates[0], gates[0], gates[1]] if len(gates) == 2 else gates
        return Routing(values, torch.stack(lanes), s.h, torch.stack([g.expand_as(s.h) for g in gates]))

    def _enriched(self, route: Route, s: Deltas, site: Site, place: int) -> Tensor:
        """h + g r."""
        values = self._values(route, s, site)
        if route.query is None:
            return route.gate.onto(s.h, values[0])
        open_one = s.partial if self.include_partial else ()
        finished, plain = values[: len(values) - len(open_one)], route.gate.kind == "none"
        r = s.ahead.attend(
            route.query, finished, open_one, place=place, onto=s.h if plain else None, **self._how(route)
        )
        return r if plain else route.gate.onto(s.h, r)

    def _coming(self, site: Site, most: int) -> tuple[list[Query], list[Tensor], list[Tensor]]:
        """The reads after `site`: whole sites, and none past the end of a longer block."""
        left = most if self.size == 1 else self.size - (site.index + 1) % self.size
        queries: list[Query] = []
        nulls: list[Tensor] = []
        gates: list[Tensor] = []
        for reader in self.plan.sites[site.index + 1 :][:left]:
            part = self.part(reader)
            if len(queries) + len(part._modules) > most:
                break
            for route in part._modules.values():
                query, null, gate = route._modules.values()
                queries.append(query)
                if null.kind == "logit":
                    nulls.append(null.logit)
                if gate.kind in ("alpha", "scalar"):
                    gates.append(gate.number())
        return queries, nulls, gates

    def _weights(self, route: Route, values: tuple[Tensor, ...]) -> Tensor:
        if route.query is None:
            return values[0].new_ones(1, *values[0].shape[:2], 1)
        return ops.attend_weights(route.query.folded(), values, **self._how(route))

    def _how(self, route: Route) -> How:
        return {"eps": self.eps, "null": route.null.asked, "centered": self.centered}

    def _values(self, route: Route, s: Deltas, site: Site) -> tuple[Tensor, ...]:
        values = s.sources + s.partial if self.include_partial else s.sources
        if route.null.kind != "vector":
            return values
        return (route.null.vector.to(s.h).expand_as(s.h), *(values if site.index else ()))

    def _names(self, site: Site) -> tuple[str, ...]:
        """The deltas that a site may read, by name; none at the first site."""
        if not site.index:
            return ()
        if self.span:
            pushed = site.layer // self.span
            late = site.first and site.layer > 0 and site.layer % self.span == 0
            return ("embed", *(f"block{i}" for i in range(pushed - late)))
        closed, inside = divmod(site.index, self.size)
        partial = ("partial",) if inside and self.include_partial else ()
        return ("embed", *group_names(self.plan, self.size, closed), *partial)

    def _write_released(self, s: Deltas, site: Site, y: Tensor) -> Deltas:
        if site.first and site.layer > 0 and site.layer % self.span == 0:
            s = s._replace(sources=(*s.sources, s.h - s.sources[-1]))
        return s._replace(h=s.h + y)

    def _layers_a_block(self, plan: Plan, block: int | None, blocks: int | None) -> int:
        """Whole layers a block in the released code, ceil(L / blocks); 0 for its mode without blocks."""
        if blocks is not None:
            return -(-plan.depth // blocks)
        if block is None or block == 1:
            return 0
        each = len(plan.sites) // plan.depth
        if block % each:
            raise ValueError(
                f"delta: compat=released has blocks of whole layers; block={block} is no multiple of {each}"
            )
        return block // each

    def _refuse(self, gate: str, null: bool, value_lane: bool) -> None:
        if self.include_partial and self.size == 1:
            raise ValueError("delta: include_partial needs block or blocks: a block of one sublayer is never open")
        if self.centered and null:
            raise ValueError("delta: centered can already take nothing; null would move its zero. Drop one")
        if self.released:
            for key, on in (
                ("include_partial", self.include_partial),
                ("centered", self.centered),
                ("value_lane", value_lane),
            ):
                if on:
                    raise ValueError(f"delta: the released code has no working {key}; drop it or compat=released")
        if value_lane and not any(site.lanes == 3 and site.index for site in self.plan.sites):
            raise ValueError("delta: value_lane needs an attention sublayer after the first site; this layout has none")
