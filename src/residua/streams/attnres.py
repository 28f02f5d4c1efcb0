"""Attention Residuals: every sublayer reads a softmax mixture of what came before it."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import OPEN, Conversion, Past, Read, Start
from residua.streams._attending import AttendingStream, Mixture, Route
from residua.streams._parts import Query, divides, group_names, group_size, positive


class Blocks(NamedTuple):
    """Finished sources and the open one."""

    done: tuple[Tensor, ...]
    """The embedding, then every finished block (with a window: the embedding, the evicted sum, the last ones)."""
    partial: tuple[Tensor, ...] = ()
    """The open block's running value: none or one."""


@register("attnres")
class AttnRes(AttendingStream[Blocks]):
    """x = sum_n softmax_n(w . rmsnorm(v_n)) v_n over v = [e, o_0, o_1, ...]; no sum is ever kept.

    block=1 is full AttnRes: a source is one sublayer's output. block=k sums k outputs a source, and a site inside
    a block also reads the sum so far. The head reads too, with a query of its own. Queries start at zero: the read
    is the mean, which the next norm maps to the standard network (up to its eps). The paper has a query at the
    first site as well; with one source it can never learn, so it is not built.

    sources=states   sources are cumulative states h_0, h_1, ..., as the Delta paper (2605.18855) describes its
                     baseline; Kimi's method mixes outputs.
    total            weights are n * softmax: the zero-query read is the stream itself, with no norm to rely on.
    heads            slices of the width route apart; keys are normalised over the whole width (our reading of
                     MHAR, which heads=1 reduces to the paper).
    init_std         queries start from N(0, init_std^2), as a port of MHAR has them (0.02): reads then tell their
                     sources apart from the first step, and the network does not start as the standard one.
    window           keep the embedding, the last `window` finished sources and the sum of the evicted ones;
                     evicted=drop is the paper's own ablation, which forgets them.
    """

    paper = "arXiv 2603.15031"
    mixes = "sublayer outputs, or sums of blocks of them"
    released_in: ClassVar = {"Kimi K3": "attnres:block=24,eps=1e-5"}
    cases = (
        "",
        "block=3",
        "blocks=2",
        "sources=states",
        "sources=states,block=2",
        "total=true,block=2",
        "heads=2,eps=1e-5",
        "heads=2,init_std=0.02",
        "window=1",
        "window=2,total=true",
        "window=1,evicted=drop,block=2",
        "window=1,evicted=drop,sources=states",
    )
    conversion = Conversion({"total": True})
    refuses: ClassVar = {
        "gate": "its read replaces the stream, and a gate would mix it with the open block alone; use delta:gate=...",
        "include_partial": "the open block is always a source here; delta has the choice",
    }

    def __init__(
        self,
        plan: Plan,
        *,
        block: int | None = None,
        blocks: int | None = None,
        sources: Literal["outputs", "states"] = "outputs",
        total: bool = False,
        heads: int = 1,
        window: int | None = None,
        evicted: Literal["sum", "drop"] = "sum",
        eps: float = 1e-6,
        init_std: float = 0.0,
    ) -> None:
        super().__init__(plan)
        self.size = group_size(self.name, plan, block, blocks)
        self.states, self.total, self.heads, self.eps = sources == "states", total, heads, eps
        self.window, self.drop, self.drawn = window, evicted == "drop", init_std > 0
        positive(self.name, heads=heads, window=1 if window is None else window)
        divides(self.name, plan, heads)
        if init_std < 0:
            raise ValueError(f"{self.name}: init_std={init_std} is a standard deviation, and 0 for zeros")
        if window is None and self.drop:
            raise ValueError(f"{self.name}: evicted=drop needs a window")
        if window is not None and self.states and not self.drop:
            raise ValueError(
                f"{self.name}: states already hold what a window evicts, so a sum of them is no state; "
                "write sources=states,evicted=drop"
            )
        for site in plan.readers[1:]:  # the first has one source, which needs no query
            self.at[site.name] = query = Query(plan.width, init_std)
            self._routes[site.name] = (Route(query),)

    @property
    def starts(self) -> Start:
        forgets = self.drop and len(self.plan.sites) // self.size > (self.window or 0)
        if self.states or forgets or self.drawn:
            return "no"
        return "standard" if self.total else "eps"

    def open(self, x: Tensor, past: Past = None) -> Blocks:
        return Blocks((x,))

    def plain(self, s: Blocks) -> Tensor:
        return s.done[0]

    def mixture(self, s: Blocks, site: Site) -> Mixture:
        if self.window is not None:  # an old source may leave
            return Mixture((), s.done + s.partial)
        return Mixture(s.done, s.partial)

    def write(self, s: Blocks, site: Site, read: Read, y: Tensor) -> Blocks:
        if s.partial or self.states:
            y = (s.partial or s.done[-1:])[0] + y
        closes = (site.index + 1) % self.size == 0
        return Blocks(self._kept((*s.done, y))) if closes else Blocks(s.done, (y,))

    def sources(self, site: Site) -> tuple[str, ...]:
        if not site.index:
            return ()
        closed, inside = divmod(site.index, self.size)
        finished = group_names(self.plan, self.size, closed)
        if self.window is not None and closed > self.window:
            finished = (() if self.drop else ("evicted",)) + finished[-self.window :]
        return ("embed", *finished, *((OPEN,) if inside else ()))

    def _kept(self, done: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sources that stay in the window."""
        if self.window is None or len(done) <= self.window + 1:
            return done
        embed, *finished = done
        if self.drop:
            return (embed, *finished[-self.window :])
        evicted, recent = finished[: -self.window], finished[-self.window :]
        return (embed, evicted[0] if len(evicted) == 1 else evicted[0] + evicted[1], *recent)
