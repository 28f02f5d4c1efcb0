"""DenseFormer: a depth-weighted average of all block outputs after each block."""

from __future__ import annotations

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Norm, Read, Routing
from residua.streams._layered import Dense, DenseStream
from residua.streams._parts import Static, positive


@register("denseformer")
class DenseFormer(DenseStream):
    """y_i = sum_{j<=i, j=i mod k} alpha[i, j] x_j after block i, where i is a multiple of p; x_{i+1} = block(y_i).

    Weights are free scalars, one-hot on the newest block at the start, so the design starts as the standard
    Transformer. They are kept at the site that reads the average: the next block's first sublayer, or the head.
    (The package of the authors does this; their experiments folder groups layers differently and is not followed.)

    dilation   k: sources i, i - k, i - 2k, ...      period   p: average after every p-th block only.

    Where the head's average would have one source its weight could not move, as the final norm forgets scale, and
    it is not built.
    """

    paper = "arXiv 2402.02622"
    cases = ("", "dilation=2", "period=2", "dilation=3,period=2")

    def __init__(self, plan: Plan, *, dilation: int = 1, period: int = 1) -> None:
        super().__init__(plan)
        positive(self.name, dilation=dilation, period=period)
        self.dilation, self.period = dilation, period
        self.each(lambda site: Static(len(self.sources(site)), 1.0) if self.sources(site) else None)

    def read(self, s: Dense, site: Site, norm: Norm) -> Read:
        part = self.part(site)
        h = s.h if part is None else ops.mix(part.alpha, self.taken(s.sources))
        return Read(norm(h), carry=h)

    def routing(self, s: Dense, site: Site) -> Routing | None:
        part = self.part(site)
        return None if part is None else Routing.static(self.taken(s.sources), part.alpha)
