"""A released model's own loop: between layers its `hidden_states` stay as they were, in a layer they are the state.

    hidden_states = layer(hidden_states, ...)      enter, read and write at every site, leave
    hidden_states = norm(hidden_states)            the head's read

The class of the model, its config and its keys do not change: only layers and what collapses the streams at the end get
subclasses that walk the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from residua.hf.anatomy import Argument
from residua.hf.owner import Owner
from residua.plan import Site
from residua.runner import Flow, Runner
from residua.stream import State


class Shape(Protocol):
    """How a released class lays its streams out in one tensor."""

    def embedding(self, hidden_states: Tensor) -> Tensor:
        """What the model copied or projected to all streams before the first layer, [b t d]."""

    def enter(self, hidden_states: Tensor) -> State:
        """The state of the design."""

    def leave(self, state: State) -> Tensor:
        """The tensor that passes between layers."""


class Walk:
    """The sites of one layer, one after another."""

    def __init__(
        self, runner: Runner, sites: tuple[Site, ...], shape: Shape, hidden_states: Tensor, state: State = None
    ) -> None:
        """state: that of the first site, where the model has made it already; by default the stream opens it."""
        self.runner, self.shape, self.sites = runner, shape, iter(sites)
        first = not sites[0].index
        if first and state is None:
            self.flow = self.runner.open(shape.embedding(hidden_states))
            return
        if first:
            self.runner.opened(shape.embedding(hidden_states))
        self.flow = Flow(shape.enter(hidden_states) if state is None else state)

    @property
    def hidden_states(self) -> Tensor:
        """The streams as the released class has them."""
        return self.shape.leave(self.runner.cut(self.flow))

    def add(self, more: Tensor) -> None:
        """Add to the streams what is no stream of the design, such as an n-gram table."""
        self.flow = Flow(self.shape.enter(self.hidden_states + more))

    def through(self, norm: nn.Module | None, sublayer: Callable[[Tensor], Tensor]) -> None:
        """Read, apply a sublayer, write."""
        site = next(self.sites)
        read = self.runner.read(self.flow, site, normalised(norm))
        self.flow = self.runner.write(self.flow, site, read, sublayer(*read.lanes))


def normalised(norm: Callable[[Tensor], Tensor] | None) -> Callable[..., tuple[Tensor, ...]]:
    """A module that norms one tensor, as a stream calls norms."""
    return (lambda *lanes: lanes) if norm is None else (lambda *lanes: tuple(norm(lane) for lane in lanes))


class OnReleased:
    """What the swapped classes share."""

    owner: Owner
    shape: Shape
    sites: tuple[Site, ...]

    def walk(self, hidden_states: Tensor, state: State = None) -> Walk:
        """The sites of this layer, on the stream of the model."""
        return Walk(self.runner(), self.sites, self.shape, hidden_states, state)

    def runner(self) -> Runner:
        """Of the stream of the model."""
        backbone = self.owner.backbone
        return Runner(backbone.stream, backbone.execution, blockwise=True)


class Passed(OnReleased):
    """hidden_states -> hidden_states: what collapsed the streams, where the norm behind it does so now."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class HeadNorm(OnReleased):
    """hidden_states -> the head's read, normalised: the final norm."""

    def forward(self, hidden_states: Tensor, *args: Argument) -> Tensor:
        normalise = super().forward  # type: ignore[misc]
        return head_read(self, hidden_states, normalise)


class HeadRead(OnReleased):
    """hidden_states -> the head's read: of a design that normalises by itself."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return head_read(self, hidden_states, None)


def head_read(place: OnReleased, hidden_states: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
    """What the head reads."""
    runner = place.runner()
    (x,) = runner.read(Flow(place.shape.enter(hidden_states)), runner.plan.head, normalised(norm)).lanes
    return x
