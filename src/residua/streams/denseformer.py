"""DenseFormer: a depth-weighted average of all block outputs after each block."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._layered import Dense
from residua.streams._parts import Static, block_names, opens_block, positive

T = TypeVar("T")


@register("denseformer")
class DenseFormer(Stream[Dense]):
    """y_i = sum_{j<=i, j=i mod k} alpha[i, j] x_j after block i, where i is a multiple of p; x_{i+1} = block(y_i).

    Weights are free scalars, one-hot on the newest block at the start, so the design starts as the standard
    Transformer. They are kept at the site that reads the average: the next block's first sublayer, or the head.
    (The package of the authors does this; their experiments folder groups layers differently and is not followed.)

    dilation   k: sources i, i - k, i - 2k, ...      period   p: average after every p-th block only.

    Where the head's average would have one source its weight could not move, as the final norm forgets scale, and
    it is not built.
    """

    paper = "arXiv 2402.02622"
    mixes = "states after blocks"
    conversion = Conversion(exact=True)
    cases = ("", "dilation=2", "period=2", "dilation=3,period=2")

    def __init__(self, plan: Plan, *, dilation: int = 1, period: int = 1) -> None:
        super().__init__(plan)
        positive(self.name, dilation=dilation, period=period)
        self.dilation, self.period = dilation, period
        self.each(lambda site: Static(len(self.sources(site)), 1.0) if self.sources(site) else None)

    @property
    def starts(self) -> Start:
        return "standard"

    def open(self, x: Tensor, past: Past = None) -> Dense:
        return Dense(x, (x,))

    def read(self, s: Dense, site: Site, norm: Norm) -> Read:
        part = self.part(site)
        h = s.h if part is None else ops.mix(part.alpha, self._taken(s.sources))
        return Read(norm(h), carry=h)

    def write(self, s: Dense, site: Site, read: Read, y: Tensor) -> Dense:
        h = read.carry + y
        return Dense(h, (*s.sources, h) if site.last else s.sources)

    def sources(self, site: Site) -> tuple[str, ...]:
        if not opens_block(site) or site.layer % self.period:
            return ()
        taken = self._taken(block_names(site.layer))
        return () if len(taken) == 1 and site.kind == "head" else taken

    def routing(self, s: Dense, site: Site) -> Routing | None:
        part = self.part(site)
        if part is None:
            return None
        return Routing(self._taken(s.sources), part.alpha[None, :, None, None, None].expand(1, -1, *s.h.shape[:2], 1))

    def _taken(self, sources: tuple[T, ...]) -> tuple[T, ...]:
        """Every dilation-th source, counted back from the newest."""
        return sources[:: -self.dilation][::-1]
