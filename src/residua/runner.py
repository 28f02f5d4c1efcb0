"""A design says what a site reads; a runner says how: one by one, several in one pass, in a type of its own, watched.

    runner = Runner(stream)
    flow = runner.open(embedding)
    for site, sublayer in ...:
        read = runner.read(flow, site, sublayer.norm)
        flow = runner.write(flow, site, read, sublayer(*read.lanes))
    (x,) = runner.read(flow, plan.head, final_norm).lanes

The verbs are those of a `Stream`, and so are their results. What flows is the design's state and, beside it, what
execution keeps for the next sites; `cut` leaves that behind, so that a checkpoint or a pipeline stage gets the state of
the equation and nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from residua.plan import Plan, Site
from residua.read_groups import NOTHING, Ahead, ReadGroups
from residua.stream import Answer, Norm, Past, Read, State, Stream


class Flow(NamedTuple):
    """What passes from site to site."""

    state: State
    """Of the design: all that its equation needs."""
    ahead: Ahead = NOTHING
    """Of the runner: reads of coming sites that were begun or made already."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How streams run."""

    dtype: torch.dtype | None = None
    """The type of the state from `open` to the head, whatever sublayers compute in; None: that of the embedding."""
    autocast: bool = True
    """Whether the design's own arithmetic follows the autocast around it."""
    group: int = 16
    """Most reads that share a pass over their sources, fewer while there are few of those; of 4 to 24, what 48 blocks
    ran fastest with; 0 for none."""
    least: int = 1 << 16
    """Numbers in a source from which sharing pays in training: below, a call costs more than the memory it saves."""

    def own(self, device: torch.device) -> AbstractContextManager[object]:
        """Where a design's own arithmetic runs."""
        return nullcontext() if self.autocast else torch.autocast(device.type, enabled=False)


PLAINLY = Execution()


class Observer:
    """Sees what a runner does; `lanes` may also change it."""

    def opened(self, x: Tensor) -> None:
        """A forward begins."""

    def lanes(self, state: State, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What a site reads before its norm (after it, where the design has its own); the return value is read in its
        place."""
        return lanes

    def read(self, state: State, site: Site, lanes: tuple[Tensor, ...], read: Read) -> None:
        """A site has read these lanes."""

    def wrote(self, site: Site, y: Tensor, state: State) -> None:
        """A site has written y, and left this state."""


_observers: WeakKeyDictionary[Stream, tuple[Observer, ...]] = WeakKeyDictionary()


@contextmanager
def observed(stream: Stream, *observers: Observer) -> Iterator[None]:
    """Let observers see every forward of a stream in the `with`, after those that see it already.

    A compiled graph has no place to look: in the `with`, compiled models run as they were written.
    """
    compiled = "torch._dynamo" in sys.modules
    _observers[stream] = (*_observers.get(stream, ()), *observers)
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        left = list(_observers[stream])
        for one in observers:  # the last of equal ones: an outer `with` may have it too
            del left[len(left) - 1 - left[::-1].index(one)]
        _observers[stream] = tuple(left)


class Runner:
    """The three verbs of a stream, executed."""

    def __init__(self, stream: Stream, execution: Execution = PLAINLY, *, blockwise: bool = False) -> None:
        """blockwise: the state is cut after every block, so that nothing is begun for the next one."""
        self.stream, self.execution = stream, execution
        self.groups: ReadGroups | None = None
        self.observers = () if torch.compiler.is_compiling() else _observers.get(stream, ())
        if stream.attends and execution.group:
            declared: Any = stream  # or a wrapper that has its attributes and not its class
            self.groups = ReadGroups(declared, execution.group, execution.least, blockwise)

    @property
    def plan(self) -> Plan:
        """That of the stream."""
        return self.stream.plan

    def open(self, x: Tensor, past: Past = None, ids: Tensor | None = None) -> Flow:
        """The flow before the first site."""
        self.opened(x)
        asked: dict[str, Tensor] = {}
        if self.stream.takes_ids:
            if ids is None:
                raise ValueError(f"{self.stream.spec} looks up token ids and was given embeddings alone; pass ids")
            asked["ids"] = ids
        dtype = self.execution.dtype
        if dtype is None:
            return Flow(self.stream.open(x, past, **asked))
        with self.execution.own(x.device):
            return Flow(cast(self.stream.open(x.to(dtype), past, **asked), dtype))

    def opened(self, x: Tensor) -> None:
        """Tell the observers that a forward begins: `open` does, and a backbone that makes its first state itself."""
        for one in self.observers:
            one.opened(x)

    def read(self, flow: Flow, site: Site, norm: Norm) -> Read:
        """What `site` takes from the stream."""
        if self.stream.sided:
            read = self._executed(flow, site, norm)
            with self.execution.own(read.lanes[0].device):
                return read._replace(values=self.stream.given(flow.state, site, read.lanes))
        return self._executed(flow, site, norm)

    def _executed(self, flow: Flow, site: Site, norm: Norm) -> Read:
        if not self.observers and self.execution.dtype is None:
            return self._read(flow, site, norm)
        norm = norm if self.execution.dtype is None else _widened(norm)
        with self.execution.own(pytree.tree_leaves(flow.state)[0].device):
            return self._watched(flow, site, norm) if self.observers else self._read(flow, site, norm)

    def write(self, flow: Flow, site: Site, read: Read, y: Tensor | Answer) -> Flow:
        """The flow after the sublayer at `site` answered its read with `y`."""
        dtype = self.execution.dtype
        if isinstance(y, Answer):
            values, y = y.values if dtype is None else y.values.to(dtype), y.y
            flow = flow._replace(state=self.stream.keep(flow.state, site, values))
        if dtype is None:
            after = self._onward(self.stream.write(flow.state, site, read, y), flow, site)
        else:
            with self.execution.own(y.device):
                state = cast(self.stream.write(flow.state, site, read, y.to(dtype)), dtype)
                after = self._onward(state, flow, site)
        for one in self.observers:
            one.wrote(site, y, after.state)
        return after

    def past(self, flow: Flow) -> Past:
        """What the next tokens need from this pass."""
        return self.stream.past(flow.state)

    @staticmethod
    def cut(flow: Flow) -> State:
        """The state alone, which crosses a pipeline cut or is kept by a checkpoint; `Flow(state)` goes on with it."""
        return flow.state

    def _read(self, flow: Flow, site: Site, norm: Norm) -> Read:
        if self.groups is not None and (flow.ahead.begun or flow.ahead.made):
            lanes = self.groups.lanes(flow.state, flow.ahead, site)
            if lanes is not None:
                return Read(norm(*lanes))
        return self.stream.read(flow.state, site, norm)

    def _onward(self, state: State, flow: Flow, site: Site) -> Flow:
        if self.groups is None:
            return Flow(state)
        return Flow(*self.groups.onward(state, flow.ahead, site))

    def _watched(self, flow: Flow, site: Site, norm: Norm) -> Read:
        before: tuple[Tensor, ...] = ()
        lanes: tuple[Tensor, ...] = ()

        def seen(raw: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal before, lanes
            before = lanes = raw
            for one in self.observers:
                lanes = one.lanes(flow.state, site, lanes)
            return lanes

        read = self._read(flow, site, lambda *raw: norm(*seen(raw)))
        if not before:  # no norm was called: what was read is what the sublayer gets
            read = read._replace(lanes=seen(read.lanes))
        if lanes is not before:  # a design may carry what it read on to its write
            changed = {id(old): new for old, new in zip(before, lanes, strict=True)}
            read = Read(read.lanes, pytree.tree_map_only(Tensor, lambda leaf: changed.get(id(leaf), leaf), read.carry))
        for one in self.observers:
            one.read(flow.state, site, lanes, read)
        return read


class Step(NamedTuple):
    """One site of a walk."""

    site: Site
    state: State
    """Before the read."""
    lanes: tuple[Tensor, ...]
    """What was read, before the norm; as it was read, where the design calls none."""
    read: Read
    y: Tensor | None
    """What the sublayer answered, its output alone; the head answers nothing."""
    after: State
    """The state after the write."""


def unchanged(*lanes: Tensor) -> tuple[Tensor, ...]:
    """A norm that does nothing."""
    return lanes


def walk(
    runner: Runner | Stream,
    x: Tensor,
    answer: Callable[[Site, Read], Tensor | Answer],
    norm: Callable[[Site], Norm] = lambda site: unchanged,
    between: Callable[[Flow], Flow] = lambda flow: flow,
    ids: Tensor | None = None,
) -> Iterator[Step]:
    """Open, then every read and write, then the head's read: one step a site.

    answer:  the sublayer of a site, given its read. Where a design asks for more than an output (attention's values,
             extra channels) and gets none, they are zeros.
    norm:    that of a site.
    between: what happens to the flow before each site.
    ids:     the tokens, for a design that looks them up; all 0 by default.
    """
    runner = runner if isinstance(runner, Runner) else Runner(runner)
    ids = x.new_zeros(x.shape[:2], dtype=torch.long) if ids is None and runner.stream.takes_ids else ids
    flow = runner.open(x, ids=ids)
    for site in runner.plan.readers:
        flow = between(detached(flow) if site.first and site.layer == runner.plan.cut else flow)
        lanes, normed = _kept(norm(site))
        read = runner.read(flow, site, normed)
        y = None if site.kind == "head" else answer(site, read)
        if isinstance(y, Tensor):
            y = _completed(runner.stream, site, y)
        after = flow if y is None else runner.write(flow, site, read, y)
        yield Step(site, flow.state, tuple(lanes) or read.lanes, read, y.y if isinstance(y, Answer) else y, after.state)
        flow = after


def detached(flow: Flow) -> Flow:
    """The same numbers without a history: where a loop's gradients end."""
    return Flow(pytree.tree_map(Tensor.detach, flow.state))


def _completed(stream: Stream, site: Site, y: Tensor) -> Tensor | Answer:
    extra = stream.plan.width + stream.extra(site) - y.shape[-1]
    y = F.pad(y, (0, extra)) if extra else y
    return Answer(y, y.new_zeros(*y.shape[:2], math.prod(stream.plan.kv))) if stream.values(site).kept else y


def cast(state: State, dtype: torch.dtype) -> State:
    """Every number of a state in one type; what the state holds twice stays one tensor."""
    leaves, shape = pytree.tree_flatten(state)
    made = {id(leaf): leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves}
    return pytree.tree_unflatten([made[id(leaf)] for leaf in leaves], shape)


def _kept(norm: Norm) -> tuple[list[Tensor], Norm]:
    """A list that is filled with what the norm is given, and that norm."""
    given: list[Tensor] = []

    def normed(*lanes: Tensor) -> tuple[Tensor, ...]:
        given.extend(lanes)
        return norm(*lanes)

    return given, normed


def _widened(norm: Norm) -> Norm:
    """A norm in float32, as its gain is: only like types have a fused norm, and the projections narrow its result."""
    return lambda *lanes: norm(*(lane.float() for lane in lanes))
