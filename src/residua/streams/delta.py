"""Delta Attention Residuals: the stream is kept, and every sublayer also reads a routed mixture of its changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from residua.plan import Plan, Site
from residua.registry import register
from residua.spec import Value
from residua.stream import OPEN, Read, Start
from residua.streams._attending import Mixture, Null
from residua.streams._deltas import Asked, Deltas, DeltaStream, GateOption
from residua.streams._parts import group_names, group_size


@register("delta")
class Delta(DeltaStream):
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

    The public code differs in what a block's source is: that is the design `delta_released`.
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
        gate: GateOption = "none",
        null: bool = False,
        value_lane: bool = False,
        centered: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        self.size = group_size(self.name, plan, block, blocks)
        self.include_partial, self.centered, self.eps = include_partial, centered, eps
        self._refuse(null, value_lane)
        for site in plan.sites[1:]:  # the first site reads the plain stream
            count = len(self._names(site))
            if centered and count == 1:  # nothing to weigh against
                continue
            lanes = 2 if value_lane and site.lanes == 3 else 1
            routes = tuple(self.route(count + null, Null() if null else None, gate) for _ in range(lanes))
            self.at[site.name] = nn.ModuleList(Asked(*route) for route in routes)
            self._routes[site.name] = routes

    @classmethod
    def upgraded(cls, options: dict[str, Value]) -> tuple[str, dict[str, Value]]:
        rest = {key: value for key, value in options.items() if key != "compat"}
        return ("delta_released" if options.get("compat") == "released" else cls.name), rest

    @classmethod
    def entering(cls, options: Mapping[str, Value]) -> dict[str, Value]:
        # centred reads add nothing at the start, and need no gate for that
        return dict(options) if options.get("centered") else super().entering(options)

    @property
    def starts(self) -> Start:
        if self.centered or self.options["gate"] == "alpha":
            return "standard"
        return "eps" if self.size == 1 or self.include_partial else "no"

    def mixture(self, s: Deltas, site: Site) -> Mixture:
        return Mixture(s.sources, s.partial if self.include_partial else ())

    def write(self, s: Deltas, site: Site, read: Read, y: Tensor) -> Deltas:
        change = s.partial[0] + y if s.partial else y
        if (site.index + 1) % self.size == 0:
            return Deltas(s.h + y, (*s.sources, change))
        return Deltas(s.h + y, s.sources, (change,))

    def sources(self, site: Site) -> tuple[str, ...]:
        return self._names(site) if self.routes(site) else ()

    def _names(self, site: Site) -> tuple[str, ...]:
        """The deltas that a site may read."""
        closed, inside = divmod(site.index, self.size)
        partial = (OPEN,) if inside and self.include_partial else ()
        return ("embed", *group_names(self.plan, self.size, closed), *partial)

    def _refuse(self, null: bool, value_lane: bool) -> None:
        if self.include_partial and self.size == 1:
            raise ValueError("delta: include_partial needs block or blocks: a block of one sublayer is never open")
        if self.centered and null:
            raise ValueError("delta: centered and null exclude each other; drop one")
        if value_lane and not any(site.lanes == 3 and site.index for site in self.plan.sites):
            raise ValueError("delta: value_lane needs an attention sublayer after the first site; this layout has none")
