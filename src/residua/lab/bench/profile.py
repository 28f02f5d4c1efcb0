"""Where the time goes: the parts of what is timed elsewhere as a whole, each beside what bounds it.

Calls of the depth read in C are timed one by one, and torch's own operations by its profiler; what neither explains is
Python, autograd and the allocator. A call's arithmetic and its least traffic follow from its arguments; the bounds are
the rates of a matrix product and of a plain sum in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from residua.lab.bench import stack
from residua.lab.bench.cases import OURS, attend
from residua.lab.bench.device import now
from residua.lab.bench.timing import Form, Measured
from residua.native.library import TYPES, library

BOUNDS = 9
"""Repetitions of a matrix product and a sum, of which the fastest counts."""


def measure(depth: int, width: int, tokens: int, repeats: int = 5) -> Measured:
    """The reads of a deep stack, and single reads whose bars are about the smallest and the largest."""
    named = {}
    for dtype in stack.TYPES:
        told = f"all reads of {depth} blocks, full delta, {tokens}x{width} {str(dtype).removeprefix('torch.')}"
        named[told] = stack.ours("delta", depth, width, tokens, dtype=dtype)
    for sides, n in (((2048, 256), 4), ((4096, 512), 24)):
        case = attend(*sides, n, torch.float32, compile=False)
        named[case.label()] = case.both(OURS)
    side, (a, b), numbers = 512, torch.randn(2, 512, 512), torch.randn(1 << 24)
    return {
        "multiplies_per_second": side**3 / min(_seconds(lambda: a @ b) for _ in range(BOUNDS)),
        "bytes_per_second": numbers.nbytes / min(_seconds(numbers.sum) for _ in range(BOUNDS)),
        "forms": [{"what": what, **_parts(form, repeats)} for what, form in named.items()],
    }


def _parts(form: Form, repeats: int) -> Measured:
    """Seconds of the whole, then of its parts in runs of their own: watching costs something."""
    form()
    whole = min(_seconds(form) for _ in range(repeats))
    calls: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        seen: dict[str, dict[str, float]] = {}
        with _watched(seen):
            form()
        for part, found in seen.items():
            calls.setdefault(part, []).append(found)
    parts: list[Measured] = [
        {"part": part, **min(found, key=lambda one: one["seconds"])} for part, found in calls.items()
    ]
    parts += [{"part": f"torch: {name}", **found} for name, found in _operations(form, repeats).items()]
    rest = whole - sum(part["seconds"] for part in parts)
    return {"seconds": whole, "parts": [*parts, {"part": "Python, autograd, allocator", "seconds": max(rest, 0.0)}]}


def _seconds(form: Form) -> float:
    began = now()
    form()
    return now() - began


@contextmanager
def _watched(seen: dict[str, dict[str, float]]) -> Iterator[None]:
    """Adds up the calls of the depth read inside a `with`, by kind."""
    lib = library()
    names = {"residua_attend": "forward", "residua_attend_gradient": "backward"}
    before = {name: getattr(lib, name) for name in names}

    def watch(run: Callable[..., int], phase: str) -> Callable[..., int]:
        def watched(*arguments: Any) -> int:
            began = now()
            answer = run(*arguments)
            took = now() - began
            kind = "read" if arguments[6] == 1 and not arguments[13] else "merge" if arguments[13] else "group of reads"
            found = seen.setdefault(f"{kind}, {phase}", {"seconds": 0.0, "calls": 0, "multiplies": 0, "bytes": 0})
            multiplies, moved = _cost(phase, *arguments[:7])
            for key, value in (("seconds", took), ("calls", 1), ("multiplies", multiplies), ("bytes", moved)):
                found[key] += value
            return answer

        watched.argtypes = ()  # type: ignore[attr-defined]  # what `entry` asks for
        return watched

    try:
        for name, phase in names.items():
            setattr(lib, name, watch(before[name], phase))
        yield
    finally:
        for name, run in before.items():
            setattr(lib, name, run)


def _cost(
    phase: str, kind: int, threads: int, tokens: int, width: int, heads: int, sources: int, queries: int
) -> tuple[int, int]:
    """Multiplications with additions, and bytes that must move at least.

    Forward, a number of a source is squared, and for every query multiplied into a logit and into the read. Backward,
    it is squared and pulled back through its norm, and for every query multiplied into a logit, a slope and the query's
    gradient, and made into its own gradient from that of the read and from the query.
    """
    size = next(dtype for dtype, code in TYPES.items() if code == kind).itemsize
    numbers = tokens * width
    if phase == "forward":
        return numbers * sources * (2 * queries + 1), numbers * size * (sources + queries)
    return numbers * sources * (5 * queries + 2), numbers * size * (2 * sources + queries)


def _operations(form: Form, repeats: int, least: float = 0.01) -> dict[str, dict[str, float]]:
    """Torch's own operations that take at least this share of all it saw, by name; the fastest of some runs."""
    found: dict[str, dict[str, float]] = {}
    everything = float("inf")
    for _ in range(repeats):
        with torch.autograd.profiler.profile() as seen:
            form()
        events = seen.key_averages()
        everything = min(everything, 1e-6 * events.self_cpu_time_total)
        for event in events:
            took = 1e-6 * event.self_cpu_time_total
            if event.key.startswith("aten::") and took < found.get(event.key, {"seconds": took + 1})["seconds"]:
                found[event.key] = {"seconds": took, "calls": event.count}
    return {name: one for name, one in found.items() if one["seconds"] >= least * everything}
