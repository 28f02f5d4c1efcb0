"""predict_ranks(config, parallel, ...): memory, traffic and time of every rank of a step, without allocating anything.

The ranks of one copy of the model differ by their pipeline stages and by nothing else, so that there is one account for
each place along `pp`. Memory is what lies there at the fullest moment of torch's own schedule; bytes are those that
cross a rank's links in one step; times are upper bounds, as if no communication overlapped with arithmetic.

Not counted: what an allocator wastes, buffers of the communication library, temporaries inside kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from residua.counting.shapes import unfilled
from residua.lab.cost.bill import Bill
from residua.lab.cost.timeline import Device, Timeline, timeline
from residua.model.config import ModelConfig
from residua.model.transformer import Transformer
from residua.scale.cuts import Cuts, Link, Route, even, links, looped, routes
from residua.scale.layout import AXES, Parallel
from residua.scale.schedules import SCHEDULES, check, check_split, orders

MASTER = 4
"""Bytes of a parameter, of its gradient and of each of the two moments of AdamW: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank at its fullest moment."""

    parameters: int
    gradients: int
    optimizer: int
    """The two moments of AdamW."""
    gathered: int
    """Whole parameters of the units that FSDP has open, and their gradients before they are scattered."""
    activations: int
    """Of the sublayers, kept for the backward passes of the micro-batches in flight."""
    depth_state: int
    """The same for the residual design: sources, and what its reads and writes keep."""
    cut_buffers: int
    """What torch receives states and gradients into, for all micro-batches of a step."""
    loss: int
    """Logits, their logarithms and gradients, on the rank that has the head."""
    temporaries: int
    """Of a backward pass: gradients inside the site that keeps most, about as much as it keeps, and those of what the
    stage was given."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One place along `pp`."""

    place: int
    stages: tuple[range, ...]
    """The blocks of its stages."""
    memory: Memory
    traffic: Mapping[str, int]
    """Bytes that it sends in a step, by axis of the mesh; `shared` are gradients of what several stages hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One step of one copy of the model."""

    parallel: Parallel
    schedule: str
    rows: int
    """Of one copy."""
    tokens: int
    microbatches: int
    ranks: tuple[Rank, ...]
    links: tuple[Link, ...]
    """Of the pipeline; tensors and bytes of one micro-batch."""
    time: Timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = {name: getattr(self, name) for name in ("schedule", "rows", "tokens", "microbatches")}
        ranks = [
            {
                "place": one.place,
                "blocks": [[blocks.start, blocks.stop] for blocks in one.stages],
                "memory": asdict(one.memory) | {"total": one.memory.total},
                "traffic": dict(one.traffic),
            }
            for one in self.ranks
        ]
        return found | {
            "parallel": self.parallel.to_json(),
            "ranks": ranks,
            "links": [asdict(link) for link in self.links],
            "time": asdict(self.time) | {"communication_share": self.time.communication_share},
        }


def predict_ranks(
    config: ModelConfig,
    parallel: Parallel,
    *,
    rows: int,
    tokens: int,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    virtual: int | None = None,
    incremental: bool = True,
    dtype: torch.dtype = torch.float32,
    path: str = "reference",
    checkpointed: bool = False,
    device: Device | None = None,
    build: Callable[[ModelConfig], Transformer] = Transformer,
) -> Ranks:
    """Predict memory, communication and time of every rank in one step of `rows` x `tokens` tokens per replica.

    microbatches, schedule, virtual: of the pipeline, as in `Pipeline`; without `pp`, micro-batches are accumulated.
    incremental:  a rank keeps what its later stages need, and is not sent it again.
    dtype:        of activations and of what is sent; parameters, gradients and optimizer state are float32.
    path, build:  as in `predict`.
    checkpointed: blocks are recomputed in the backward pass.
    device:       its speed and links, for the time of a step.
    """
    device = device or Device()
    pp = parallel.pp
    if pp == 1:
        schedule, virtual, microbatches = "1f1b", 1, microbatches or 1
    microbatches = microbatches or 2 * pp
    stages = check(config, pp, schedule, microbatches=microbatches, rows=rows, virtual=virtual)
    parallel.check(config, parallel.ranks, context=tokens)
    bill = Bill.of(config, rows // microbatches, tokens, dtype, path, build, checkpointed)
    with unfilled():
        model = build(config).to(dtype)
    cuts = Cuts.of(model, rows // microbatches, tokens)
    plan = routes(cuts, even(config.depth, stages), looped(stages, pp), incremental=incremental)
    if SCHEDULES[schedule].split:
        check_split(config, cuts, plan)
    order = orders(schedule, pp, virtual=stages // pp, microbatches=microbatches)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    found = []
    for place in range(pp):
        mine = [route for route in plan if route.rank == place]
        held = _Held.of(cuts, plan, place, sizes, parallel)
        memory = _memory(cuts, bill, mine, held, order[place], parallel, microbatches, dtype)
        traffic = _traffic(cuts, plan, place, held, parallel, microbatches, dtype, bill.doors(mine))
        found.append(Rank(place=place, stages=tuple(route.layers for route in mine), memory=memory, traffic=traffic))
    between = links(cuts, plan)
    seconds = [device.seconds(one.traffic, parallel) for one in found]
    flops = [bill.flops(route.layers) / parallel.tp for route in plan]
    return Ranks(
        parallel=parallel,
        schedule=schedule,
        rows=rows,
        tokens=tokens,
        microbatches=microbatches,
        ranks=tuple(found),
        links=tuple(between),
        time=timeline(
            order,
            [one / device.flops for one in flops],
            device.hops(between, parallel),
            seconds,
            checkpointed=checkpointed,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """Parameters of one rank, in numbers."""

    whole: int
    """Before FSDP; after tensor parallelism."""
    largest: int
    """The two largest blocks that FSDP has open at a time, and what lies beside the blocks."""
    shared: int
    """What adding up the gradients of parameters that other stages hold too sends."""

    @classmethod
    def of(cls, cuts: Cuts, plan: list[Route], place: int, sizes: Mapping[str, int], parallel: Parallel) -> _Held:
        mine = [route for route in plan if route.rank == place]
        names = set().union(*(cuts.held(route.layers) for route in mine)) & sizes.keys()
        split = {name: _split(name, sizes[name], parallel.tp) for name in names}
        blocks: Counter[str] = Counter()
        for name in names:
            if name.startswith("blocks."):
                blocks[name.split(".")[1]] += split[name]
        beside = sum(split.values()) - blocks.total()
        largest = sum(size for _, size in blocks.most_common(2)) + beside
        shared = 0.0
        for name in names:
            holders = len({route.rank for route in plan if not cuts.users[name].isdisjoint(route.layers)})
            shared += 2 * split[name] * (holders - 1) / holders
        return cls(sum(split.values()), largest, round(shared))


def _split(name: str, numbers: int, tp: int) -> int:
    """What tensor parallelism leaves of a parameter on a rank: a share of the matrices of blocks, of the embedding and
    of the head; norms and the design's own are whole."""
    cut = name.startswith(("blocks.", "embed.", "head.")) and not name.rsplit(".", 2)[-2].endswith("norm")
    return -(-numbers // tp) if cut else numbers


def _memory(
    cuts: Cuts,
    bill: Bill,
    mine: list[Route],
    held: _Held,
    order: list[tuple[str, int]],
    parallel: Parallel,
    microbatches: int,
    dtype: torch.dtype,
) -> Memory:
    own = -(-held.whole // parallel.fsdp)
    most = _fullest(cuts, bill, mine, order, parallel.tp)
    head = any(route.layers.stop == len(cuts.at) - 1 for route in mine)
    buffers = sum(
        cuts.nbytes(route.inbox) + cuts.nbytes(label for label in route.outbox if cuts.like[label].requires_grad)
        for route in mine
    )
    # in a pipeline units stay open from one micro-batch to the next, and gradients are scattered at the end of the step
    opened = held.whole if parallel.pp > 1 else held.largest
    # and gradients that are accumulated over several passes are scattered after the last
    summed = held.whole if microbatches > 1 else opened
    gathered = opened * dtype.itemsize + summed * MASTER if parallel.fsdp > 1 else 0
    return Memory(
        parameters=MASTER * own,
        gradients=MASTER * own,
        optimizer=2 * MASTER * own,
        gathered=gathered,
        activations=most["backbone"],
        depth_state=most["stream"],
        cut_buffers=microbatches * buffers // parallel.tp,
        loss=bill.loss if head else 0,
        temporaries=max(
            bill.most(route.layers, parallel.tp)
            + cuts.nbytes(label for label in (*route.inbox, *route.taken) if cuts.like[label].requires_grad)
            // parallel.tp
            for route in mine
        ),
    )


def _fullest(cuts: Cuts, bill: Bill, mine: list[Route], order: list[tuple[str, int]], tp: int) -> Counter[str]:
    """What the micro-batches in flight keep when they keep most, by part."""
    stages = {route.stage: route for route in mine}
    kept = {stage: bill.kept(cuts, route, tp) for stage, route in stages.items()}
    turned = {stage: bill.turned(route.layers, tp) for stage, route in stages.items()}
    now, most, done = Counter[str](), Counter[str](), Counter[int]()
    waiting: set[tuple[int, str]] = set()
    for action, stage in order:
        for part, size in kept[stage].items():  # until the gradients for weights are there
            now[part] += {"F": 1, "B": -1, "W": -1, "I": 0}[action] * size
        between = {"F": 0, "B": 0, "W": -1, "I": 1}[action]
        now["backbone"] += between * turned[stage]
        now["stream"] += between * kept[stage]["stream"] // 2
        if action in "BI":  # gradients of what the rank has kept lie there until they are asked for
            number = done[stage]
            done[stage] += 1
            waiting |= {(number, label) for label in stages[stage].taken if cuts.like[label].requires_grad}
            waiting -= {(number, label) for label in stages[stage].kept}
        full = Counter(now)
        full["stream"] += cuts.nbytes(label for _, label in waiting) // tp
        if full.total() > most.total():
            most = full
    return most


def _traffic(
    cuts: Cuts,
    plan: list[Route],
    place: int,
    held: _Held,
    parallel: Parallel,
    microbatches: int,
    dtype: torch.dtype,
    doors: int,
) -> dict[str, int]:
    """Bytes that a rank sends in a step. A collective over n ranks sends (n - 1) / n of what it moves."""
    found = dict.fromkeys((*AXES, "shared"), 0)
    for link in links(cuts, plan):
        found["pp"] += microbatches * (link.forward * (link.source == place) + link.backward * (link.target == place))
    found["pp"] //= parallel.tp
    if parallel.fsdp > 1:
        # gathered for every forward pass and again for its backward one, in a pipeline once for all; scattered once
        times = 1 if parallel.pp > 1 else 2 * microbatches
        moved = held.whole * (times * dtype.itemsize + MASTER)
        found["fsdp"] = moved * (parallel.fsdp - 1) // parallel.fsdp
    own = -(-held.whole // parallel.fsdp)
    found["dp"] = 2 * MASTER * own * (parallel.dp - 1) // parallel.dp
    found["shared"] = MASTER * held.shared // parallel.fsdp
    # a gather and a scatter of the stream at every sublayer, in the forward pass and in the backward one
    found["tp"] = 4 * microbatches * doors * (parallel.tp - 1) // parallel.tp
    return found
