"""Designs whose sources are whole blocks: a block opens with a mixture of all sources and appends what it made."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from residua import ops
from residua.plan import Site
from residua.stream import Norm, Past, Read, Routing, Stream
from residua.streams._parts import block_names


class Dense(NamedTuple):
    """The stream inside the open block, and what every finished block left."""

    h: Tensor
    sources: tuple[Tensor, ...]
    """The embedding, then every block's output before it was mixed."""


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
    """x = sum_i softmax(a)_i H_i over block outputs, with one learned vector a at every site that mixes."""

    @abstractmethod
    def mixes_at(self, site: Site) -> bool:
        """Whether a site reads a mixture; elsewhere the newest source is read."""

    def mixed(self, sources: tuple[Tensor, ...], site: Site) -> tuple[Tensor, ...]:
        part = self.part(site)
        return (sources[-1] if part is None else ops.mix(part.alpha.softmax(0), sources),)

    def sources(self, site: Site) -> tuple[str, ...]:
        return block_names(site.layer) if self.mixes_at(site) else ()

    def routing(self, s: Layered, site: Site) -> Routing | None:
        if not self.mixes_at(site):
            return None
        weights = self.part(site).alpha.softmax(0)
        return Routing(s.sources, weights[None, :, None, None, None].expand(1, -1, *s.sources[0].shape[:2], 1))
