"""The stream and what it is made of: what both forms of Delta Attention Residuals share."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from residua.stream import Conversion, Past
from residua.streams._attending import AttendingStream, Gate, Null, Route
from residua.streams._parts import Part, Query

GateOption = Literal["none", "scalar", "vector", "alpha"]


class Deltas(NamedTuple):
    """The stream and what it is made of."""

    h: Tensor
    sources: tuple[Tensor, ...]
    """The embedding, then the change made by every finished block."""
    partial: tuple[Tensor, ...] = ()
    """The change of the open block so far: none or one."""


class Asked(nn.Module):
    """The parameters of one read, by name."""

    def __init__(self, query: Query | None, null: Part | None, gate: Gate | None) -> None:
        super().__init__()
        self.query, self.null, self.gate = query, null, gate


class DeltaStream(AttendingStream[Deltas]):
    """x = h + gate * read: what both forms of the design share."""

    conversion = Conversion({"gate": "alpha"}, exact=True)

    def open(self, x: Tensor, past: Past = None) -> Deltas:
        return Deltas(x, (x,))

    def plain(self, state: Deltas) -> Tensor:
        return state.h

    base = plain

    def route(self, choices: int, null: Null | None, gate: GateOption) -> Route:
        """A read with so many choices, of which one needs no query.

        Under alpha = 0 a zero query would sit on a saddle: its read is a multiple of h, which the norm forgets, so that
        alpha has no gradient, and without alpha the query has none.
        """
        query = Query(self.plan.width, 0.02 if gate == "alpha" else 0.0) if choices > 1 else None
        return Route(query, null, None if gate == "none" else Gate(gate, self.plan.width))
