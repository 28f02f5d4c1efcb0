"""Designs whose sources are whole blocks: a block opens with a mixture of all sources and appends what it made."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, TypeVar

from torch import Tensor

from residua import ops
from residua.plan import Site
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parts import block_names, opens_block

T = TypeVar("T")


class Dense(NamedTuple):
    """The stream inside the open block, and what every finished block left."""

    h: Tensor
    sources: tuple[Tensor, ...]
    """The embedding, then every block's output before it was mixed."""


class DenseStream(Stream[Dense]):
    """h <- a mixture of the states after blocks, where a block opens; `read` carries it to h <- h + f(norm(h)).

    dilation, period: every dilation-th state counted back from the newest, after every period-th block.
    """

    mixes = "states after blocks"
    conversion = Conversion(exact=True)
    starts: Start = "standard"
    dilation: int
    period: int
    prepost: bool = False
    """Whether the mixture is added to h, so that the scale of a single source matters."""

    def open(self, x: Tensor, past: Past = None) -> Dense:
        return Dense(x, (self.source(x),))

    def write(self, s: Dense, site: Site, read: Read, y: Tensor) -> Dense:
        h = read.carry + y
        return Dense(h, self.kept((*s.sources, self.source(h))) if site.last else s.sources)

    def sources(self, site: Site) -> tuple[str, ...]:
        if not opens_block(site) or site.layer % self.period:
            return ()
        taken = self.taken(block_names(self.plan, site.layer))
        forgotten = site.kind == "head" and len(taken) == 1 and not self.prepost  # a gain, which the norm undoes
        return () if forgotten else taken

    def source(self, x: Tensor) -> Tensor:
        """A state as it is mixed."""
        return x

    def taken(self, sources: tuple[T, ...]) -> tuple[T, ...]:
        """Those that a site mixes."""
        return sources[:: -self.dilation][::-1]

    def kept(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those that later sites can still mix."""
        return sources


class Layered(NamedTuple):
    """Block outputs, and the block that is open."""

    sources: tuple[Tensor, ...]
    """The embedding, then one per finished block."""
    base: tuple[Tensor, ...] = ()
    """What the open block read at its first sublayer: none or one."""
    delta: tuple[Tensor, ...] = ()
    """The sum of the open block's sublayer outputs: none or one."""


class LayeredStream(Stream[Layered]):
    """lanes = mixed(sources); inside the block x = inner(base, delta); sources <- [*sources, output(base, delta)]."""

    @abstractmethod
    def mixed(self, sources: tuple[Tensor, ...], site: Site) -> tuple[Tensor, ...]:
        """The lanes that a block's first sublayer, or the head, reads. The first of them is the block's base."""

    def inner(self, base: Tensor, delta: Tensor) -> Tensor:
        """What a later sublayer of the block reads."""
        return base + delta

    def output(self, base: Tensor, delta: Tensor) -> Tensor:
        """The source that a finished block becomes."""
        return delta

    def kept(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sources that stay once a block has been appended."""
        return sources

    def open(self, x: Tensor, past: Past = None) -> Layered:
        return Layered((x,))

    def read(self, s: Layered, site: Site, norm: Norm) -> Read:
        if s.delta:
            return Read(norm(self.inner(s.base[0], s.delta[0])), carry=s.base[0])
        lanes = self.mixed(s.sources, site)
        return Read(norm(*lanes), carry=lanes[0])

    def write(self, s: Layered, site: Site, read: Read, y: Tensor) -> Layered:
        delta = s.delta[0] + y if s.delta else y
        if site.last:
            return Layered(self.kept((*s.sources, self.output(read.carry, delta))))
        return Layered(s.sources, (read.carry,), (delta,))


class StaticLayered(LayeredStream):
    """x = sum_i softmax(a)_i H_i over block outputs, with one learned vector a at every site that mixes; elsewhere the
    newest is read."""

    starts: Start = "no"

    def mixed(self, sources: tuple[Tensor, ...], site: Site) -> tuple[Tensor, ...]:
        part = self.part(site)
        return (sources[-1] if part is None else ops.mix(part.alpha.softmax(0), sources),)

    def sources(self, site: Site) -> tuple[str, ...]:
        return () if self.part(site) is None else block_names(self.plan, site.layer)

    def routing(self, s: Layered, site: Site) -> Routing | None:
        part = self.part(site)
        return None if part is None else Routing.static(s.sources, part.alpha.softmax(0))
