"""What crosses the boundaries of a pipeline: labels of the state between blocks, and who has to send which of them.

    cuts   = Cuts.of(model, rows, tokens)                  # model: on the meta device
    stages = even(depth, 8)                                # blocks of every stage
    plan   = routes(cuts, stages, looped(8, 4))            # 8 stages on 4 ranks
    links(cuts, plan)                                      # tensors and bytes over every link, a micro-batch

The stream is walked once without data. Each tensor of a state gets a label, the place that made it, so that no design
is named here: a tensor that a later boundary shows again is the same one, and a rank that has seen it need not be sent
it again. Nothing here knows `torch.distributed`: what is sent and what is predicted come from one table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from residua import ops
from residua.model.transformer import Transformer
from residua.plan import Site
from residua.runner import Flow, Runner, walk
from residua.stream import Answer, Read, State, Stream


@dataclass(frozen=True, slots=True)
class Boundary:
    """The state between two blocks."""

    labels: tuple[str, ...]
    """One a tensor; a tensor that the state holds twice has one label."""
    leaves: tuple[int, ...]
    """Which label each leaf of the tree has."""
    tree: Any
    """How the leaves make a state."""

    def state(self, have: Mapping[str, Tensor]) -> State:
        """The state, from tensors by label."""
        return pytree.tree_unflatten([have[self.labels[at]] for at in self.leaves], self.tree)

    def tensors(self, state: State) -> dict[str, Tensor]:
        """The inverse."""
        leaves = pytree.tree_leaves(state)
        return {self.labels[at]: leaf for at, leaf in zip(self.leaves, leaves, strict=True)}


@dataclass(frozen=True, slots=True)
class Cuts:
    """`at[l]` is the state before block l, `at[depth]` the one that the head reads."""

    at: tuple[Boundary, ...]
    like: Mapping[str, Tensor]
    """A tensor without data for every label: shape, type, and whether gradients come back for it."""
    users: Mapping[str, frozenset[int]]
    """The blocks that use each parameter or buffer of the model, by name. What opens the stream belongs to the first
    block, what the head needs to the last."""
    sites: Mapping[str, tuple[Site, ...]]
    """The sites that use each tensor of the stream."""

    @classmethod
    def of(cls, model: Transformer, rows: int, tokens: int) -> Cuts:
        """Walk the stream of a model on the meta device, for micro-batches of `rows` x `tokens`."""
        if model.plan.loop is not None and model.plan.loop.passes > 1:
            raise ValueError(
                f"layout {model.config.layout}: blocks that run {model.plan.loop.passes} times cannot be cut into "
                "pipeline stages; drop pp or the loop"
            )
        stream, depth = model.stream, model.plan.depth
        names, watch = _Names(), _Uses(dict(_tensors_of(stream)), model.plan.readers)
        # what execution keeps between sites never crosses a cut; the meta device has no autocast to be kept out of
        plainly = replace(model.execution, group=0, autocast=True)
        dtype = model.embed.weight.dtype
        with torch.device("meta"), torch.enable_grad(), ops.backend("reference"), watch:
            x = torch.empty(rows, tokens, model.plan.width, dtype=dtype, requires_grad=True)
            at = []
            steps = walk(
                Runner(stream, plainly), x, lambda site, read: _answer(stream, site, read, dtype), between=watch.next
            )
            for step in steps:
                if step.site.index == 0:
                    names.note(step.state, "embed")
                if step.site.first:
                    at.append(names.boundary(step.state))
                names.note(step.after, step.site.name)
        users = {f"stream.{name}": found for name, found in watch.users.items()}
        sites = {f"stream.{name}": found for name, found in watch.sites.items()}
        return cls(tuple(at), names.like, users | _backbone(model, depth), sites)

    def held(self, layers: range) -> set[str]:
        """The parameters and buffers that a stage of these blocks needs."""
        return {name for name, blocks in self.users.items() if not blocks.isdisjoint(layers)}

    def repeated(self, layers: range) -> list[str]:
        """The tensors of the stream that several sites of a stage of these blocks share."""
        last = len(self.at) - 2
        return [
            name for name, sites in self.sites.items() if sum(min(site.layer, last) in layers for site in sites) > 1
        ]

    def nbytes(self, labels: Iterable[str]) -> int:
        """Of these tensors."""
        return sum(self.like[label].nbytes for label in labels)


def _tensors_of(stream: Stream) -> Iterable[tuple[str, Tensor]]:
    yield from stream.named_parameters()
    yield from stream.named_buffers()


def _answer(stream: Stream, site: Site, read: Read, dtype: torch.dtype) -> Tensor | Answer:
    """What a sublayer gives back, without its numbers."""
    rows, tokens = read.lanes[0].shape[:2]
    y = torch.empty(rows, tokens, stream.plan.width + stream.extra(site), dtype=dtype, requires_grad=True)
    if not stream.values(site).kept:
        return y
    heads, width = stream.plan.kv
    return Answer(y, torch.empty(rows, tokens, heads * width, dtype=dtype, requires_grad=True))


def _backbone(model: Transformer, depth: int) -> dict[str, frozenset[int]]:
    """The blocks that use what is not the stream's."""
    first, last = frozenset([0]), frozenset([depth - 1])
    found = {}
    for name, _ in model.named_parameters():
        top, _, rest = name.partition(".")
        if top == "blocks":
            found[name] = frozenset([int(rest.partition(".")[0])])
        elif top == "embed":
            found[name] = first | last if model.head is None else first
        elif top != "stream":
            found[name] = last
    return found


class _Names:
    """Labels for tensors, by the place where they were first seen."""

    def __init__(self) -> None:
        self.like: dict[str, Tensor] = {}
        self._labels: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an id is given to another tensor once its own is gone

    def note(self, state: State, place: str) -> None:
        """Name what is new in a state."""
        new = [leaf for leaf in pytree.tree_leaves(state) if id(leaf) not in self._labels]
        for count, leaf in enumerate({id(leaf): leaf for leaf in new}.values()):
            label = f"{place}/{count}"
            self._labels[id(leaf)] = label
            self._alive.append(leaf)
            self.like[label] = torch.empty(
                leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
            )

    def boundary(self, state: State) -> Boundary:
        """A state whose tensors all have names."""
        leaves, tree = pytree.tree_flatten(state)
        named = [self._labels[id(leaf)] for leaf in leaves]
        labels = tuple(dict.fromkeys(named))
        return Boundary(labels, tuple(labels.index(label) for label in named), tree)


class _Uses(TorchDispatchMode):
    """Which sites use which tensors of a stream: seen where operators are called, so that any design may keep its
    parameters under any name and share them between sites."""

    def __init__(self, tensors: Mapping[str, Tensor], readers: Sequence[Site]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._readers, self._place = readers, 0
        self._places: defaultdict[str, set[int]] = defaultdict(set)

    def next(self, flow: Flow) -> Flow:
        """Called before every site."""
        self._place += 1
        return flow

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf))
            if name is not None:
                self._places[name].add(self._place)
        return func(*args, **(kwargs or {}))

    @property
    def sites(self) -> dict[str, tuple[Site, ...]]:
        """The sites that use each tensor; what opens the stream is the first one's."""
        found = {name: sorted({max(place - 1, 0) for place in self._places[name]}) for name in self._names.values()}
        return {name: tuple(self._readers[place] for place in places) for name, places in found.items()}

    @property
    def users(self) -> dict[str, frozenset[int]]:
        """The blocks that use each tensor."""
        last = self._readers[-1].layer - 1
        return {name: frozenset(min(site.layer, last) for site in sites) for name, sites in self.sites.items()}


@dataclass(frozen=True, slots=True)
class Route:
    """What one stage takes and gives, by label."""

    stage: int
    rank: int
    layers: range
    inbox: tuple[str, ...]
    """Received from the stage before."""
    taken: tuple[str, ...]
    """Kept by this rank since an earlier stage of its own."""
    outbox: tuple[str, ...]
    """Sent to the stage after."""
    kept: tuple[str, ...]
    """New on this rank, and a later stage of this rank needs it."""
    last_here: bool
    """No later stage on this rank: what it kept of a micro-batch can go."""


def even(depth: int, stages: int) -> list[range]:
    """Runs of blocks that differ by one at most."""
    if not 1 <= stages <= depth:
        raise ValueError(f"{depth} blocks make at most {depth} pipeline stages, not {stages}")
    edges = [depth * stage // stages for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


def looped(stages: int, ranks: int) -> list[int]:
    """The rank of every stage: 0, 1, ..., ranks - 1, 0, 1, ..."""
    return [stage % ranks for stage in range(stages)]


def routes(cuts: Cuts, layers: Sequence[range], rank_of: Sequence[int], *, incremental: bool = True) -> list[Route]:
    """Who sends what to whom. Without `incremental` every boundary carries the whole state.

    A rank has what it was sent and what it made. A stage is sent what its rank lacks, and one tensor at least, which
    its backward pass hangs on: the newest that gradients come back for.
    """
    count = len(layers)
    needs = [cuts.at[one.start].labels if one.start else () for one in layers]
    held: dict[int, set[str]] = {rank: set() for rank in rank_of}
    inbox: list[tuple[str, ...]] = []
    new: list[list[str]] = []
    for stage in range(count):
        have = held[rank_of[stage]]
        # neighbours on one rank hand over without sending, so whole
        known = have if incremental and stage and rank_of[stage] != rank_of[stage - 1] else set()
        lacking = tuple(label for label in needs[stage] if label not in known)
        if needs[stage] and not any(cuts.like[label].requires_grad for label in lacking):
            newest = [label for label in needs[stage] if cuts.like[label].requires_grad][-1]
            lacking = tuple(label for label in needs[stage] if label in (*lacking, newest))
        inbox.append(lacking)
        made = cuts.at[layers[stage].stop].labels if stage < count - 1 else ()
        new.append([label for label in dict.fromkeys((*needs[stage], *made)) if label not in have])
        have.update(new[stage])
    taken = [tuple(label for label in needs[stage] if label not in inbox[stage]) for stage in range(count)]
    found = []
    for stage in range(count):
        later = [other for other in range(stage + 1, count) if rank_of[other] == rank_of[stage]]
        wanted = {label for other in later for label in taken[other]}
        found.append(
            Route(
                stage=stage,
                rank=rank_of[stage],
                layers=layers[stage],
                inbox=inbox[stage],
                taken=taken[stage],
                outbox=inbox[stage + 1] if stage < count - 1 else (),
                kept=tuple(label for label in new[stage] if label in wanted),
                last_here=not later,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Link:
    """What goes over one boundary for one micro-batch."""

    stage: int
    """The one that sends; the next receives, and sends gradients back."""
    source: int
    target: int
    """Ranks."""
    tensors: int
    forward: int
    """Bytes."""
    backward: int
    """Bytes of gradients; none for what has none, such as token ids."""


def links(cuts: Cuts, plan: Sequence[Route]) -> list[Link]:
    """Every boundary between two ranks, in order."""
    found = []
    for one, other in pairwise(plan):
        if one.rank != other.rank:
            back = [label for label in one.outbox if cuts.like[label].requires_grad]
            found.append(
                Link(one.stage, one.rank, other.rank, len(one.outbox), cuts.nbytes(one.outbox), cuts.nbytes(back))
            )
    return found
