"""timeline(orders, ...): how long a step takes if every rank does its work in torch's order and nothing overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from residua.scale.cuts import Link
from residua.scale.layout import AXES, Parallel

DURATIONS: Mapping[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""In forward passes: a backward pass makes twice as many products."""
AGAIN: Mapping[str, int] = {**DURATIONS, "B": 3, "I": 2}
"""Where a backward pass first runs the blocks once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device and its links sustain; numbers to plan with, not measurements."""

    flops: float = 4e14
    """Operations a second: about two fifths of what an H100 has for bfloat16."""
    inside: float = 3e11
    """Bytes a second between devices of one machine, in one direction."""
    between: float = 5e10
    """Bytes a second and device between machines."""
    machine: int = 8
    """Devices in one machine."""

    def bandwidth(self, axis: str, parallel: Parallel) -> float:
        """Of the links along an axis: inside a machine if it spans no more devices than that has. The last axis of the
        mesh changes fastest."""
        counts = parallel.to_json()
        span = 1
        for name in AXES[AXES.index("pp" if axis == "shared" else axis) :]:
            span *= counts[name]
        return self.inside if span <= self.machine else self.between

    def seconds(self, traffic: Mapping[str, int], parallel: Parallel) -> float:
        """Of the collectives of a step; what crosses the cuts of a pipeline is timed where it happens."""
        return sum(size / self.bandwidth(axis, parallel) for axis, size in traffic.items() if axis != "pp")

    def hops(self, links: Sequence[Link], parallel: Parallel) -> dict[tuple[str, int], float]:
        """Seconds of every send, forward from a stage and backward to it."""
        speed = self.bandwidth("pp", parallel)
        forward = {("F", link.stage): link.forward / parallel.tp / speed for link in links}
        return forward | {("B", link.stage): link.backward / parallel.tp / speed for link in links}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of one step."""

    step: float
    compute: float
    """Arithmetic of the busiest rank."""
    bubble: float
    """Its waiting for other stages, with links that take no time."""
    communication: float
    """What sends and collectives add, if nothing overlaps."""

    @property
    def communication_share(self) -> float:
        """Of the step."""
        return self.communication / self.step if self.step else 0.0


def timeline(
    orders: Sequence[Sequence[tuple[str, int]]],
    forward: Sequence[float],
    hops: Mapping[tuple[str, int], float],
    collectives: Sequence[float],
    *,
    checkpointed: bool = False,
) -> Timeline:
    """orders: what every rank does. forward: seconds of a micro-batch in every stage. hops: of every send, by direction
    and by the earlier of the two stages. collectives: of every rank, at the end of its step."""
    spent = AGAIN if checkpointed else DURATIONS
    busy = max(sum(spent[action] * forward[stage] for action, stage in mine) for mine in orders)
    quiet = _last(orders, forward, {}, [0.0] * len(orders), spent)
    whole = _last(orders, forward, hops, collectives, spent)
    return Timeline(step=whole, compute=busy, bubble=quiet - busy, communication=whole - quiet)


def _last(
    orders: Sequence[Sequence[tuple[str, int]]],
    forward: Sequence[float],
    hops: Mapping[tuple[str, int], float],
    collectives: Sequence[float],
    spent: Mapping[str, int],
) -> float:
    """When the last rank is done."""
    ends: dict[tuple[str, int, int], float] = {}
    counts: Counter[tuple[str, int]] = Counter()
    places, times = [0] * len(orders), [0.0] * len(orders)
    final = len(forward) - 1
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(orders):
            while places[rank] < len(mine):
                action, stage = mine[places[rank]]
                way = "B" if action == "I" else action
                number = counts[way, stage]
                before = 0.0
                if way == "F" and stage:
                    before = ends.get(("F", stage - 1, number), -1.0)
                elif way == "B":
                    after = ("B", stage + 1, number) if stage < final else ("F", stage, number)
                    before = ends.get(after, -1.0)
                if before < 0:
                    break
                hop = hops.get((way, stage - 1 if way == "F" else stage), 0.0) if way != "W" else 0.0
                times[rank] = max(times[rank], before + hop) + spent[action] * forward[stage]
                ends[way, stage, number] = times[rank]
                counts[way, stage] += 1
                places[rank] += 1
                moved = True
    if places != [len(mine) for mine in orders]:
        raise RuntimeError("a schedule waits for itself")
    return max(time + rest for time, rest in zip(times, collectives, strict=True))
