"""Two-phase depth reads: coming reads share one pass over the sources there are, and each adds later ones itself.

Exact, because queries do not depend on tokens and softmaxes merge by their log-sums. The passes over n sources that a
stack of reads makes fall from one a read to one a group. It is how reads run and not what they are: a design hands its
sources through `Ahead`, and where a group does not pay (few tokens, another backend) that holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua import ops
from residua.native import guard
from residua.native.library import available
from residua.ops._backend import choice
from residua.ops.attend import cpu
from residua.ops.attend.native import Carry
from residua.ops.attend.together import together
from residua.streams._parts import Query

GROUP = 16
"""Reads that share a pass: of 4 to 24, what 48 blocks ran fastest with. Each is one more value in the state."""
LEAST = 1 << 16
"""Numbers in a source from which that pays: below, a call costs more than the memory it saves."""

Coming = Callable[[int], tuple[list[Query], list[Tensor], list[Tensor]]]
"""At most so many of the next reads, in order: their queries, and a null [1] and a gate [1] for each or for none.
A gate is what a read is multiplied by where it is `complete`."""


class Ahead(NamedTuple):
    """What the next reads already took from older sources, and the sources that came since."""

    reads: tuple[Carry, ...] = ()
    fresh: tuple[Tensor, ...] = ()
    complete: tuple[Tensor, ...] = ()
    """Reads that have all their sources already, times their gates, where nobody asks for gradients."""

    def attend(
        self,
        query: Query,
        sources: tuple[Tensor, ...],
        partial: tuple[Tensor, ...] = (),
        *,
        place: int = 0,
        eps: float,
        null: Tensor | None = None,
        heads: int = 1,
        total: bool = False,
        centered: bool = False,
        onto: Tensor | None = None,
    ) -> Tensor:
        """`ops.attend` over the sources and the open one, where the read is not `complete`; `place` counts the reads of
        one site."""
        every = sources + partial
        if not self.reads:
            return ops.attend(
                query.folded(), every, eps=eps, null=null, heads=heads, total=total, centered=centered, onto=onto
            )
        scale = len(every) if total else 1
        read = cpu.merge(self.reads[place], query.folded(), self.fresh + partial, eps=eps, heads=heads, scale=scale)
        return read if onto is None else onto + read

    def pushed(self, source: Tensor) -> Ahead:
        """With one more finished source."""
        return Ahead(self.reads, (*self.fresh, source)) if self.reads else self

    def onward(
        self,
        sources: tuple[Tensor, ...],
        used: int,
        coming: Coming,
        *,
        eps: float,
        heads: int = 1,
        final: bool = False,
    ) -> tuple[Ahead, tuple[Tensor, ...]]:
        """After a site that made `used` reads, and the sources to go on with: a new group where the last is used up.

        final: the coming reads see these sources and no later ones; without gradients they are then made at once, for
        few tokens too.
        """
        if len(self.complete) > used:
            return Ahead((), (), self.complete[used:]), sources
        if len(self.reads) > used:
            return Ahead(self.reads[used:], self.fresh), sources
        final = final and not torch.is_grad_enabled()
        if len(sources) < 2 or not ((final and sources[0].numel() < LEAST) or _pays(sources[0])):
            return Ahead(), sources
        queries, nulls, gates = coming(GROUP)
        if len(queries) < 2 or not _served(sources[0]):
            return Ahead(), sources
        try:
            if final:
                each: list[Any] = [query._parameters for query in queries]  # a module's attributes are slow
                made = together(
                    [one["query"] for one in each], [one["gain"] for one in each], sources,
                    nulls=nulls, gates=gates, eps=eps, heads=heads,
                )  # fmt: skip
                return Ahead((), (), made), sources
            null = torch.cat(nulls) if nulls else None
            carries, sources = cpu.ahead(Query.stacked(queries), sources, null, eps=eps, heads=heads)
            return Ahead(carries), sources
        except ops.Unsupported:  # one after the other, then, which says what is the matter
            return Ahead(), sources


def _pays(source: Tensor) -> bool:
    """Whether a source is large enough for reads that are merged, and of a type whose reads can be carried."""
    return source.numel() >= LEAST and source.dtype in cpu.CARRIED


def _served(source: Tensor) -> bool:
    """Whether the kernels may serve: their own checks say whether they do."""
    return choice() in ("auto", "cpu") and not guard.watched() and not guard.foreign(source) and available()
