"""Schedules of a pipeline: those of torch by name, what each of them needs, and what every rank does in its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from residua.model.config import ModelConfig
from residua.model.objective import token_loss
from residua.scale.cuts import Cuts, Route
from residua.scale.layout import Pipes


@dataclass(frozen=True, slots=True)
class Schedule:
    """One of torch's."""

    engine: Any
    several: bool
    """A rank may have several stages."""
    split: bool
    """Backward passes for inputs and for weights are apart (zero bubble)."""


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(ScheduleGPipe, several=False, split=False),
    "1f1b": Schedule(Schedule1F1B, several=False, split=False),
    "interleaved": Schedule(ScheduleInterleaved1F1B, several=True, split=False),
    "zero_bubble": Schedule(ScheduleInterleavedZeroBubble, several=True, split=True),
}


def check(
    config: ModelConfig, ranks: int, schedule: str, *, microbatches: int, rows: int, virtual: int | None = None
) -> int:
    """Refuse what cannot be a pipeline, before anything starts; otherwise the number of stages.

    virtual: stages on a rank; by default 2 where a schedule allows several, and 1 elsewhere.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
    several = SCHEDULES[schedule].several
    virtual = (2 if several else 1) if virtual is None else virtual
    if virtual < 1 or (virtual > 1 and not several):
        raise ValueError(
            f"schedule {schedule} has one stage a rank, not {virtual}; interleaved and zero_bubble have more"
        )
    loop = config.plan.loop
    if loop is not None and loop.passes > 1:
        raise ValueError(
            f"layout {config.layout}: blocks that run {loop.passes} times cannot be cut into pipeline stages; drop pp "
            "or the loop"
        )
    stages = ranks * virtual
    if stages > config.depth:
        raise ValueError(
            f"pp={ranks} with {virtual} stages a rank is {stages} stages, and the model has {config.depth} blocks"
        )
    if microbatches < 1 or rows % microbatches:
        raise ValueError(f"{rows} rows do not split into {microbatches} micro-batches; choose a divisor of {rows}")
    if schedule == "1f1b" and microbatches < stages:
        raise ValueError(f"schedule 1f1b needs as many micro-batches as stages: {stages}, not {microbatches}")
    if several and microbatches % max(1, microbatches // ranks):
        raise ValueError(
            f"schedule {schedule} sends micro-batches in rounds of pp={ranks}; {microbatches} do not make whole rounds"
        )
    return stages


def settled(config: ModelConfig, ranks: int, pipes: Pipes, rows: int) -> Pipes:
    """A pipeline of `ranks` for batches of `rows`, with every number given; refused if it cannot be.

    By default the micro-batches of a step are twice the ranks, or the nearest number below, else above, that divides
    the rows and suits the schedule.
    """
    schedule, virtual = pipes.schedule, pipes.virtual
    if pipes.microbatches is None:
        parts = [count for count in range(1, rows + 1) if rows % count == 0]
        parts.sort(key=lambda count: (count > 2 * ranks, abs(count - 2 * ranks)))
    else:
        parts = [pipes.microbatches]
    refusal = ValueError()
    for microbatches in parts:
        try:
            stages = check(config, ranks, schedule, microbatches=microbatches, rows=rows, virtual=virtual)
        except ValueError as error:
            refusal = refusal if refusal.args else error  # of the number that was wanted most
            continue
        return Pipes(schedule=schedule, microbatches=microbatches, virtual=stages // ranks)
    raise refusal


def check_split(config: ModelConfig, cuts: Cuts, plan: Sequence[Route]) -> None:
    """Refuse a zero-bubble schedule over stages in which sites share parameters: torch 2.13 runs their backward passes
    for weights through each other's graphs, which the first of them has freed."""
    for route in plan:
        shared = cuts.repeated(route.layers)
        if shared:
            raise ValueError(
                f"a zero-bubble schedule cannot split the backward pass of {config.design}: several sites of stage "
                f"{route.stage} share {', '.join(shared[:3])}; use schedule=interleaved"
            )


def orders(schedule: str, ranks: int, *, virtual: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """What every rank does, as torch plans it: (F, B, I or W, stage), for one micro-batch after the other. I and W are
    the halves of a backward pass, for inputs and for weights. Without a process group."""
    known = SCHEDULES[schedule]
    stages = [
        SimpleNamespace(
            stage_index=turn * ranks, num_stages=ranks * virtual, group_size=ranks, group_rank=0, group=None,
            is_first=turn == 0, is_last=False, has_backward=True, device="cpu", submod=nn.Identity(),
            stage_index_to_group_rank={},
        )
        for turn in range(virtual)
    ]  # fmt: skip
    engine = known.engine(stages if known.several else stages[0], microbatches, loss_fn=token_loss, scale_grads=False)
    actions = [[action for action in engine.pipeline_order[rank] if action is not None] for rank in range(ranks)]
    return [
        [(one.computation_type.value, one.stage_index) for one in mine if one.computation_type.value in "FBIW"]
        for mine in actions
    ]
