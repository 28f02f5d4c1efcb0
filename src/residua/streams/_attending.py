"""Designs whose sites attend over sources: every read is declared, and evaluated or taken apart from the declaration.

    x = base + gate * sum_n softmax_n(query . rmsnorm(v_n)) v_n

`routes` says who asks at a site, `mixture` what is mixed there. `read` and `routing` both follow from these, and a
runner may evaluate several declared reads at once (`residua.read_groups`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.plan import Plan, Site
from residua.stream import Norm, Read, Routing, S, Stream
from residua.streams._parts import Part, Query, constant


class Null(Part):
    """The logit of a source whose value is zero: the choice to take nothing."""

    logit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add("logit", (1,), constant(0.0))


class Gate(Part):
    """g in x = h + g r: a sigmoid scalar or vector that starts at sigmoid(-2), or a plain scalar (alpha) from 0."""

    logit: Tensor  # of a scalar
    weight: Tensor  # of a vector, as is the bias
    bias: Tensor
    alpha: Tensor  # of a plain scalar

    def __init__(self, kind: Literal["scalar", "vector", "alpha"], width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scalar":
            self.add("logit", (1,), constant(-2.0))  # one entry and not zero axes: sharding needs an axis
        elif kind == "vector":
            self.add("weight", (width, width), constant(0.0))
            self.add("bias", (width,), constant(-2.0))
        else:
            self.add("alpha", (1,), constant(0.0))

    def forward(self, h: Tensor) -> Tensor:
        """g, as wide as it is."""
        if self.kind == "vector":
            return F.linear(h.to(self.weight.dtype), self.weight, self.bias).sigmoid().to(h.dtype)
        return self.number().to(h.dtype)

    def number(self) -> Tensor:
        """g [1], of a kind that does not depend on h."""
        return self.alpha if self.kind == "alpha" else self.logit.sigmoid()


class Route(NamedTuple):
    """Who asks in one read and how the answer enters: all that is known of it before there is a state."""

    query: Query | None
    """None where there is one source, which is taken as it is."""
    null: Null | None = None
    gate: Gate | None = None
    """None: 1."""

    @property
    def logit(self) -> Tensor | None:
        """That of the null."""
        return None if self.null is None else self.null.logit

    def onto(self, base: Tensor | None, read: Tensor) -> Tensor:
        """base + gate * read."""
        if base is None:
            return read
        return base + (read if self.gate is None else self.gate(base) * read)


class Mixture(NamedTuple):
    """What a site mixes, in the order of `Stream.sources`."""

    kept: tuple[Tensor, ...]
    """Sources that every later site sees too, unchanged and in front of its others."""
    own: tuple[Tensor, ...] = ()
    """The rest: a later site may see another value of them, or none."""


class AttendingStream(Stream[S]):
    """lanes = norm(base + gate * attend(query, sources)), a lane a route, at the sites that have routes."""

    attends = True
    eps: float
    heads: int = 1
    total: bool = False
    centered: bool = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._routes: dict[str, tuple[Route, ...]] = {}

    def routes(self, site: Site) -> tuple[Route, ...]:
        """The distinct reads of a site: one, or two of which the second is attention's value lane; none where the site
        reads `plain`."""
        return self._routes.get(site.name, ())

    @abstractmethod
    def mixture(self, state: S, site: Site) -> Mixture:
        """What the routes of a site choose from."""

    @abstractmethod
    def plain(self, state: S) -> Tensor:
        """What a site without routes reads."""

    def base(self, state: S) -> Tensor | None:
        """What a read is added to; None where it replaces the stream."""
        return None

    def feeds(self, site: Site) -> int:
        return 3 if len(self.routes(site)) == 2 else 1

    def read(self, state: S, site: Site, norm: Norm) -> Read:
        routes = self.routes(site)
        if not routes:
            return Read(norm(self.plain(state)))
        mixture, base = self.mixture(state, site), self.base(state)
        return Read(norm(*lanes([self.evaluated(route, mixture.kept + mixture.own, base) for route in routes])))

    def evaluated(self, route: Route, sources: tuple[Tensor, ...], base: Tensor | None) -> Tensor:
        """base + gate * read."""
        if route.query is None:
            return route.onto(base, sources[0])
        onto = base if route.gate is None else None  # the kernels add it on their way
        x = ops.attend(
            route.query.folded(), sources, eps=self.eps, null=route.logit, heads=self.heads, total=self.total,
            centered=self.centered, onto=onto,
        )  # fmt: skip
        return x if route.gate is None else route.onto(base, x)

    def routing(self, state: S, site: Site) -> Routing | None:
        routes = self.routes(site)
        if not routes:
            return None
        mixture, base = self.mixture(state, site), self.base(state)
        values = mixture.kept + mixture.own
        weights = torch.stack(lanes([self._weights(route, values) for route in routes]))
        if base is None:
            return Routing(values, weights)
        gates = [torch.ones_like(base) if r.gate is None else r.gate(base).expand_as(base) for r in routes]
        return Routing(values, weights, base, torch.stack(lanes(gates)))

    def gates(self, state: S, site: Site, read: Read) -> Mapping[str, Tensor]:
        base = self.base(state)
        named = zip(("gate", "gate_v"), self.routes(site), strict=False)
        return {} if base is None else {name: route.gate(base) for name, route in named if route.gate is not None}

    def _weights(self, route: Route, values: tuple[Tensor, ...]) -> Tensor:
        if route.query is None:
            return values[0].new_ones(1, *values[0].shape[:2], 1)
        return ops.attend_weights(
            route.query.folded(), values, eps=self.eps, null=route.logit, heads=self.heads, total=self.total,
            centered=self.centered,
        )  # fmt: skip


def lanes(each: list[Tensor]) -> list[Tensor]:
    """One read is every lane; of two, the first is that of queries and keys and the second that of values."""
    return each if len(each) == 1 else [each[0], *each]
