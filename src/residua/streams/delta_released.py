"""Delta Attention Residuals as the authors' code runs them: for its checkpoints."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Read, Start
from residua.streams._attending import Mixture
from residua.streams._deltas import Asked, Deltas, DeltaStream, GateOption
from residua.streams._parts import Part, constant, group_names, group_size


class NullVector(Part):
    """A learned vector among the sources, from zero, where the key norm's slope is 1 / sqrt(eps)."""

    vector: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.add("vector", (width,), constant(0.0))


@register("delta_released")
class DeltaReleased(DeltaStream):
    """x = h + g sum_n softmax_n(w . rmsnorm(d_n)) d_n; in blocks d_n = h - d_{n-1}, a true delta only up to the second.

    Without blocks a source is one sublayer's output, as in `delta`. With blocks (whole layers, ceil(L / blocks) each) a
    source is h minus the previous *source*, pushed after the first sublayer of a block's first layer has read.

    gate   none | scalar | vector | alpha, as in `delta`.
    null   a learned vector among the sources, of which the first site then reads it alone.
    """

    paper = "arXiv 2605.18855 (released code)"
    mixes = "sublayer outputs, or differences of states"
    cases = (
        "",
        "blocks=3",
        "block=1,eps=1e-5",
        "blocks=3,null=true,gate=vector",
        "null=true",
        "gate=scalar",
        "gate=alpha",
    )
    refuses: ClassVar = {
        key: f"the released code has no working {key}; use delta"
        for key in ("include_partial", "centered", "value_lane", "total", "heads")
    }

    def __init__(
        self,
        plan: Plan,
        *,
        block: int | None = None,
        blocks: int | None = None,
        gate: GateOption = "none",
        null: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        group_size(self.name, plan, block, blocks)  # refuses what cannot be
        self.eps, self.span = eps, self._layers_a_block(block, blocks)
        for site in plan.sites:
            count = len(self._names(site))
            if count + null == 0:
                continue
            route = self.route(count + null, None, gate)
            vector = NullVector(plan.width) if null else None
            self.at[site.name] = nn.ModuleList([Asked(route.query, vector, route.gate)])
            self._routes[site.name] = (route,)

    @property
    def starts(self) -> Start:
        if self.options["gate"] == "alpha":
            return "standard"
        return "no" if self.span else "eps"

    def mixture(self, s: Deltas, site: Site) -> Mixture:
        null = self.part(site)[0].null
        if null is None:
            return Mixture(s.sources)
        # a vector of the site's own stands in front, so that no two sites see the same sources
        return Mixture((), (null.vector.to(s.h).expand_as(s.h), *(s.sources if site.index else ())))

    def write(self, s: Deltas, site: Site, read: Read, y: Tensor) -> Deltas:
        if not self.span:
            return Deltas(s.h + y, (*s.sources, y))
        pushes = site.first and site.layer > 0 and site.layer % self.span == 0
        return Deltas(s.h + y, (*s.sources, s.h - s.sources[-1]) if pushes else s.sources)

    def sources(self, site: Site) -> tuple[str, ...]:
        if not self.routes(site):
            return ()
        return (("null",) if self.part(site)[0].null is not None else ()) + self._names(site)

    def _names(self, site: Site) -> tuple[str, ...]:
        """The deltas that a site may read; none at the first."""
        if not site.index:
            return ()
        if not self.span:
            return ("embed", *group_names(self.plan, 1, site.index))
        pushed = site.layer // self.span
        late = site.first and site.layer > 0 and site.layer % self.span == 0
        return ("embed", *(f"block{i}" for i in range(pushed - late)))

    def _layers_a_block(self, block: int | None, blocks: int | None) -> int:
        """Whole layers, ceil(L / blocks); 0 without blocks."""
        if blocks is not None:
            return -(-self.plan.depth // blocks)
        if block is None or block == 1:
            return 0
        each = len(self.plan.sites) // self.plan.depth
        if block % each:
            raise ValueError(f"{self.name}: blocks are whole layers; block={block} is not a multiple of {each}")
        return block // each
