"""What a sublayer is: a norm, and a map from normalised lanes to what is written to the stream.

y = sublayer(*lanes, context)       lanes: (x,), or (q, k, v) for attention, already normalised
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from residua.model.config import ModelConfig
from residua.model.context import Context
from residua.model.norms import LaneNorm, NoNorm
from residua.plan import Kinds, Site
from residua.stream import Answer, Read, Values

SUBLAYERS = Kinds()
"""What may stand in a layout."""


class Sublayer(nn.Module, ABC):
    """A norm and a map from normalised lanes to what is written to the stream.

    A subclass names its `kind` in its header, and its `lanes` if the kind is new; the keyword-only arguments of its
    constructor are its options in a layout.
    """

    norm: LaneNorm | NoNorm
    out_norm: LaneNorm | None

    def __init_subclass__(cls, *, kind: str | None = None, lanes: int | None = None) -> None:
        super().__init_subclass__()
        SUBLAYERS.add(kind, cls, lanes)

    def __init__(self, config: ModelConfig, site: Site, feeds: int) -> None:
        super().__init__()
        if feeds not in (1, site.lanes):
            raise ValueError(f"{config.design} feeds {site.name} {feeds} lanes, but it takes 1 or {site.lanes}")
        self.site = site
        self.out_norm = None  # here, because a class attribute would hide the module that may follow
        self.norm = LaneNorm(config.width, feeds if config.lane_norms == "separate" else 1, config.eps)

    def answer(self, read: Read, context: Context) -> Tensor | Answer:
        """What the sublayer gives back for a read."""
        given = self(*read.lanes, context=context, **({"values": read.values} if read.values else {}))
        y, *values = given if isinstance(given, Answer) else (given,)
        if self.out_norm is not None:
            (y,) = self.out_norm(y)
        return Answer(y, *values) if values else y

    @abstractmethod
    def flops(self, tokens: int) -> float:
        """Floating-point operations per token in a sequence of `tokens`."""

    def share(self, values: Values) -> None:
        """Do with projected values what a design says."""
        raise ValueError(f"{self.site.name} projects no values that a design could share")

    def widen(self, extra: int) -> None:
        """Write this many channels more than the width."""
        raise ValueError(f"{self.site.name} has no output projection that could be wider than the stream")

    def cache_floats(self, tokens: int) -> int:
        """Numbers that decoding keeps after `tokens` tokens of one sequence."""
        return 0

    def writers(self) -> tuple[Tensor, ...]:
        """The parameters that make its output: their start is scaled with depth, or zero."""
        return ()
