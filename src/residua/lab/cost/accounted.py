"""A runner that puts what a design does on the design's account, and the norms it calls on the backbone's.

with walk:
    model.walk(ids, Accounted(model.stream, walk))                 # accounts "stream" and "backbone"
    model.walk(ids, Accounted(model.stream, walk, by_site=True))   # "0 stream", "0 backbone", "1 stream", ...
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from residua.counting.walk import Walk
from residua.plan import Site
from residua.runner import Flow, Runner
from residua.stream import Answer, Norm, Past, Read, Stream


class Accounted(Runner):
    """A runner inside a walk.

    by_site: every site has accounts of its own; what opens the stream is on the first one's.
    """

    def __init__(self, stream: Stream, walk: Walk, *, by_site: bool = False) -> None:
        super().__init__(stream)
        self.account, self.by_site = walk, by_site

    def _on(self, part: str, index: int) -> AbstractContextManager[object]:
        return self.account.inside(f"{index} {part}" if self.by_site else part)

    def open(self, x: Tensor, past: Past = None, ids: Tensor | None = None) -> Flow:
        """As a runner; on the stream's account."""
        with self._on("stream", 0):
            return super().open(x, past, ids)

    def read(self, flow: Flow, site: Site, norm: Norm) -> Read:
        """As a runner; on the stream's account, and the norm on the backbone's."""

        def owned(*lanes: Tensor) -> tuple[Tensor, ...]:
            with self._on("backbone", site.index):
                return norm(*lanes)

        with self._on("stream", site.index):
            return super().read(flow, site, owned)

    def write(self, flow: Flow, site: Site, read: Read, y: Tensor | Answer) -> Flow:
        """As a runner; on the stream's account."""
        with self._on("stream", site.index):
            return super().write(flow, site, read, y)
