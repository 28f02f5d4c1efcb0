"""Two-phase depth reads: coming reads share one pass over the sources there are, and each adds later ones itself.

Exact, because queries do not depend on tokens and softmaxes merge by their log-sums. The passes over n sources that a
stack of reads makes fall from one a read to one a group. It is how reads run and not what they are: a design hands its
sources through `Ahead`, and where a group does not pay (few tokens, another backend) that holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residua import ops
from residua.native import guard
from residua.native.library import available
from residua.ops._backend import choice
from residua.ops.attend import cpu
from residua.ops.attend.native import Carry

GROUP = 16
"""Reads that share a pass: of 4 to 24, what 48 blocks ran fastest with. Each is one more value in the state."""
LEAST = 1 << 16
"""Numbers in a source from which that pays: below, a call costs more than the memory it saves."""

Coming = Callable[[int], Sequence[tuple[Tensor, Tensor | None]]]
"""At most so many of the next reads, in order: their queries and nulls."""


class Ahead(NamedTuple):
    """What the next reads already took from older sources, and the sources that came since."""

    reads: tuple[Carry, ...] = ()
    fresh: tuple[Tensor, ...] = ()

    def attend(
        self,
        query: Tensor,
        sources: tuple[Tensor, ...],
        partial: tuple[Tensor, ...] = (),
        *,
        place: int = 0,
        eps: float,
        null: Tensor | None = None,
        heads: int = 1,
        total: bool = False,
        centered: bool = False,
    ) -> Tensor:
        """`ops.attend` over the sources and the open one; `place` counts the reads of one site."""
        every = sources + partial
        if not self.reads:
            return ops.attend(query, every, eps=eps, null=null, heads=heads, total=total, centered=centered)
        scale = len(every) if total else 1
        return cpu.merge(self.reads[place], query, self.fresh + partial, eps=eps, heads=heads, scale=scale)

    def pushed(self, source: Tensor) -> Ahead:
        """With one more finished source."""
        return Ahead(self.reads, (*self.fresh, source)) if self.reads else self

    def onward(
        self, sources: tuple[Tensor, ...], used: int, coming: Coming, *, eps: float, heads: int = 1
    ) -> tuple[Ahead, tuple[Tensor, ...]]:
        """After a site that made `used` reads, and the sources to go on with: a new group where the last is used up."""
        if len(self.reads) > used:
            return Ahead(self.reads[used:], self.fresh), sources
        if len(sources) < 2 or not _pays(sources[0]):
            return Ahead(), sources
        reads = coming(GROUP)
        if len(reads) < 2:
            return Ahead(), sources
        nulls = [null for _, null in reads if null is not None]
        carries, sources = cpu.ahead([query for query, _ in reads], sources, nulls, eps=eps, heads=heads)
        return Ahead(carries), sources


def _pays(source: Tensor) -> bool:
    """Whether the kernels serve this source, and it is large enough."""
    return (
        source.numel() >= LEAST
        and source.is_cpu
        and source.dtype in cpu.CARRIED
        and choice() in ("auto", "cpu")
        and not torch.compiler.is_compiling()
        and not guard.traced(source)
        and available()
    )
