"""Two-phase depth reads: coming reads share one pass over the sources there are, and each adds later ones itself.

Exact, because queries do not depend on tokens and softmaxes merge by their log-sums. The passes over n sources that a
stack of reads makes fall from one a read to one a group. Nothing here is needed for a result: where what was begun does
not fit what a site then reads (another gradient mode, a state that was cut and rebuilt), the site reads plainly.
"""

from __future__ import annotations

from operator import is_not
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua import ops
from residua.native.library import asked_while_tracing
from residua.ops.attend import Carry, carries, groupable, merge, together
from residua.ops.attend import ahead as begin
from residua.plan import Site
from residua.stream import OPEN, State, Stream
from residua.streams._attending import AttendingStream, Route, lanes
from residua.streams._parts import Query


class Ahead(NamedTuple):
    """What the next reads, in order, already took from the sources that there were."""

    begun: tuple[Carry, ...] = ()
    """Reads over `covered`, for later sources to be merged with."""
    covered: tuple[Tensor, ...] = ()
    """The sources that were read."""
    queries: tuple[Tensor, ...] = ()
    """Those of the reads that were begun, folded."""
    made: tuple[Tensor, ...] = ()
    """Reads that have all their sources, times their gates where those are numbers; without gradients."""


NOTHING = Ahead()


class Coming(NamedTuple):
    """The reads after a write that can share a pass."""

    sites: tuple[Site, ...]
    complete: bool
    """They see the sources there are and no others."""


class ReadGroups:
    """Begins and ends the shared reads of one stream."""

    def __init__(self, stream: AttendingStream, group: int, least: int, blockwise: bool) -> None:
        self.stream, self.group, self.least, self.blockwise = stream, group, least, blockwise

    def lanes(self, state: State, ahead: Ahead, site: Site) -> list[Tensor] | None:
        """What a site reads, from what was begun for it; None where that does not fit."""
        stream, graded = self.stream, torch.is_grad_enabled()
        routes = stream.routes(site)
        if ahead.made:
            if graded or not routes or self._moved(state, ahead, site):
                return None
            base = stream.base(state)
            return lanes([_entered(route, made, base) for route, made in zip(routes, ahead.made, strict=False)])
        if not routes or (graded and not ahead.begun[0].value.requires_grad):
            return None
        kept, own = stream.mixture(state, site)
        count = len(ahead.covered)
        if len(kept) < count or any(map(is_not, kept, ahead.covered)):
            return None
        fresh, scale, base = kept[count:] + own, len(kept) + len(own) if stream.total else 1, stream.base(state)
        found = []
        for route, carry, query in zip(routes, ahead.begun, ahead.queries, strict=False):
            read = merge(carry, query, fresh, eps=stream.eps, heads=stream.heads, scale=scale)
            found.append(route.onto(base, read.to(kept[0].dtype)))  # what is carried may be wider
        return lanes(found)

    def _moved(self, state: State, ahead: Ahead, site: Site) -> bool:
        """Whether the sources are no longer those that were read ahead: somebody has changed the state."""
        kept, _ = self.stream.mixture(state, site)
        return len(kept) != len(ahead.covered) or any(map(is_not, kept, ahead.covered))

    def onward(self, state: State, ahead: Ahead, site: Site) -> tuple[State, Ahead]:
        """After the write of a site: what is left of what was begun, or a new beginning."""
        used = len(self.stream.routes(site))
        if len(ahead.made) > used:
            return state, Ahead(made=ahead.made[used:], covered=ahead.covered)
        if len(ahead.begun) > used:
            return state, Ahead(ahead.begun[used:], ahead.covered, ahead.queries[used:])
        if self.stream.centered or (self.blockwise and site.last):  # a mean taken away cannot be merged
            return state, NOTHING
        return self._begin(state, site)

    def _begin(self, state: State, site: Site) -> tuple[State, Ahead]:
        if torch.compiler.is_exporting():  # whether it pays depends on sizes that an exported graph must not know
            return state, NOTHING
        stream, after = self.stream, self.stream.plan.readers[site.index + 1]
        coming = _coming(stream, self.group, self.blockwise)[after.index]
        if coming is None:
            return state, NOTHING
        kept, _ = stream.mixture(state, after)
        compiling, final = torch.compiler.is_compiling(), coming.complete and not torch.is_grad_enabled()
        pays = (final and kept[0].numel() < self.least) or self._pays(kept[0]) if len(kept) > 1 else False
        if not pays or not groupable(kept[0]):
            return state, NOTHING
        routes = [route for each in coming.sites for route in stream.routes(each)]
        try:
            if final and not compiling:
                return state, Ahead(made=_made(routes, kept, stream), covered=kept)
            queries = Query.stacked([route.query for route in routes if route.query is not None])
            nulls = [route.null.logit for route in routes if route.null is not None]
            begun, covered = begin(
                queries, kept, torch.cat(nulls) if nulls else None, eps=stream.eps, heads=stream.heads
            )
        except ops.Unsupported:  # one after the other, then, which says what is the matter
            return state, NOTHING
        # sources that have a history must keep it for sites that ask for gradients; a compiler adds gradients up itself
        if compiling or not torch.is_grad_enabled():
            return state, Ahead(begun, kept, queries.unbind())
        # gradients of later reads arrive at the sources as this pass hands them on, and leave with its own added
        same = {id(old): new for old, new in zip(kept, covered, strict=True)}
        state = pytree.tree_map_only(Tensor, lambda leaf: same.get(id(leaf), leaf), state)
        return state, Ahead(begun, covered, queries.unbind())

    def _pays(self, source: Tensor) -> bool:
        """Whether a source is large enough for reads that are merged, and of a type whose reads can be carried."""
        return source.numel() >= self.least and carries(source)


def _entered(route: Route, made: Tensor, base: Tensor | None) -> Tensor:
    """base + a read that its gate, where it is a number, has multiplied already."""
    if base is None:
        return made
    return route.onto(base, made) if route.gate is not None and route.gate.kind == "vector" else base + made


def _made(routes: list[Route], sources: tuple[Tensor, ...], stream: AttendingStream) -> tuple[Tensor, ...]:
    """Complete reads, in one call that takes parameters where they lie."""
    # quicker than getattr
    queries: list[Any] = [route.query._parameters for route in routes if route.query is not None]
    return together(
        [one["query"] for one in queries], [one["gain"] for one in queries], sources,
        nulls=[route.null.logit for route in routes if route.null is not None],
        gates=[route.gate.number() for route in routes if route.gate is not None and route.gate.kind != "vector"],
        eps=stream.eps, heads=stream.heads,
    )  # fmt: skip


_known: WeakKeyDictionary[Stream, dict[tuple[int, bool], list[Coming | None]]] = WeakKeyDictionary()


def _coming(stream: AttendingStream, most: int, blockwise: bool) -> list[Coming | None]:
    """For every reader the reads from it on that share a pass, found once a stream: the plan alone decides."""
    known = _known.setdefault(stream, {})
    if (most, blockwise) not in known:
        known[most, blockwise] = _planned(stream, most, blockwise)
    return known[most, blockwise]


asked_while_tracing(_coming)


def _worth(sources: int) -> int:
    """How many reads should share a pass over so many sources, where each then merges those that came since.

    k reads cost one pass over n sources and k^2 / 2 merges of a single one: the least a read where k^2 grows as n. The
    factor is measured: of 1 to 6, what 8 blocks of 4096x64 and 12 of 512x256 ran fastest with; at 24 and 48 blocks it
    is level with the best of them.
    """
    return max(2, round((6 * sources) ** 0.5))


def _planned(stream: AttendingStream, most: int, blockwise: bool) -> list[Coming | None]:
    readers, names = stream.plan.readers, [stream.sources(site) for site in stream.plan.readers]
    kept = [tuple(name for name in each if name != OPEN) for each in names]
    # Sources that grow by one a site are worth a pass that later sites add to. Where they stay the same for a while,
    # in the blocks of a design, the next pass begins with the next block.
    grows = all(kept[i] != kept[i + 1] for i in range(1, len(readers) - 1))
    found: list[Coming | None] = []
    for first in range(len(readers)):
        sites: list[Site] = []
        count, limit = 0, min(most, _worth(len(kept[first]))) if grows else most
        for site in readers[first:]:
            count += len(stream.routes(site))
            apart = not grows and kept[site.index] != kept[first]
            if count > limit or apart or (blockwise and site.layer != readers[first].layer):
                break
            sites.append(site)
        reads = sum(len(stream.routes(site)) for site in sites)
        complete = all(names[site.index] == kept[first] for site in sites)
        found.append(Coming(tuple(sites), complete) if reads > 1 else None)
    return found
