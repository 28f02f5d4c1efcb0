"""Where the time goes: the parts of what is timed elsewhere as a whole, each beside what bounds it.

Calls of the kernels in C are timed one by one, and torch's own operations by its profiler; what neither explains is
Python, autograd and the allocator. Of a depth read, arithmetic and least traffic follow from its arguments; the bounds
are the rates of a matrix product and of a plain sum in the same process. A training step of `standard` is taken apart
whole; of that of another design each part stands beside the same part of `standard`: the difference is what it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from residua.lab.bench import model, plain, stack
from residua.lab.bench.cases import OURS, attend
from residua.lab.bench.device import now
from residua.lab.bench.timing import STANDARD, Form, Measured, interleave
from residua.native.library import TYPES, counted, library

BOUNDS = 9
"""Repetitions of a matrix product and a sum, of which the fastest counts."""

SINGLE = (((2048, 256), 4, torch.float32), ((2048, 256), 4, torch.bfloat16), ((4096, 512), 24, torch.float32))
"""Reads of their own: tokens and width, sources, type."""

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
"""Torch's operations that stand beside the rate of a matrix product."""

REST = "Python, autograd, allocator"
READS = {"residua_attend": "forward", "residua_attend_gradient": "backward"}


def measure(
    depth: int,
    width: int,
    tokens: int,
    designs: Sequence[str],
    step: Measured,
    seconds: float,
    shapes: Iterable[plain.Shape] = (),
    repeats: int = 5,
) -> Measured:
    """The reads of a deep stack, single reads whose bars are about the smallest and the largest, whole training steps
    of `standard` in some shapes, and what those of some designs, of the shape `step`, take more than `standard`'s."""
    named = {}
    for dtype in stack.TYPES:
        told = f"all reads of {depth} blocks, full delta, {tokens}x{width} {str(dtype).removeprefix('torch.')}"
        named[told] = stack.ours("delta", depth, width, tokens, dtype=dtype)
    for sides, n, dtype in SINGLE:
        case = attend(*sides, n, dtype, compile=False)
        named[case.label()] = case.both(OURS)
    side, (a, b), numbers = 512, torch.randn(2, 512, 512), torch.randn(1 << 24)
    for shape in shapes:
        told = f"training step of `standard`, {shape.depth} x {shape.width}, {shape.rows} x {shape.context} tokens"
        named[told] = plain.own_step(shape)
    return {
        "multiplies_per_second": side**3 / min(_seconds(lambda: a @ b) for _ in range(BOUNDS)),
        "bytes_per_second": numbers.nbytes / min(_seconds(numbers.sum) for _ in range(BOUNDS)),
        "forms": [{"what": what, **_parts(form, repeats)} for what, form in named.items()],
        "step": step,
        "added": _added(designs, step, seconds, repeats),
    }


def _added(designs: Sequence[str], step: Measured, seconds: float, repeats: int) -> list[Measured]:
    """For every design what its training step takes above that of `standard`, in all (interleaved with it) and by part,
    the largest first."""
    plain = model.step(STANDARD, **step)
    known = _by_part(plain, repeats)
    found = []
    for design in designs:
        form = model.step(design, **step)
        timing = interleave({STANDARD: plain, design: form}, controlled=STANDARD, seconds=seconds, least=repeats)
        of = timing.typical(STANDARD)
        added = of * (timing.ratio(STANDARD, design, STANDARD).value - 1)
        mine = _by_part(form, repeats)
        more = {name: mine.get(name, 0.0) - known.get(name, 0.0) for name in {**mine, **known}}
        more[REST] = added - sum(more.values())
        parts = [{"part": name, "seconds": more[name]} for name in sorted(more, key=lambda name: -more[name])]
        found.append({"design": design, "seconds": added, "of": of, "parts": parts})
    return found


def _by_part(form: Form, repeats: int) -> dict[str, float]:
    return {part["part"]: part["seconds"] for part in _parts(form, repeats)["parts"] if part["part"] != REST}


def _parts(form: Form, repeats: int) -> Measured:
    """Seconds of the whole, then of its parts in runs of their own: watching costs something."""
    with counted() as names:
        form()
    whole = min(_seconds(form) for _ in range(repeats))
    calls: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        seen: dict[str, dict[str, float]] = {}
        with _watched(names, seen):
            form()
        for part, found in seen.items():
            calls.setdefault(part, []).append(found)
    parts: list[Measured] = [
        {"part": part, **min(found, key=lambda one: one["seconds"])} for part, found in calls.items()
    ]
    parts += [{"part": f"torch: {name}", **found} for name, found in _operations(form, repeats).items()]
    rest = whole - sum(part["seconds"] for part in parts)
    return {"seconds": whole, "parts": [*parts, {"part": REST, "seconds": max(rest, 0.0)}]}


def _seconds(form: Form) -> float:
    began = now()
    form()
    return now() - began


@contextmanager
def _watched(names: Iterable[str], seen: dict[str, dict[str, float]]) -> Iterator[None]:
    """Adds up the calls of kernels inside a `with`: depth reads by kind, with their cost, the others by name."""
    lib = library()
    before = {name: getattr(lib, name) for name in names}

    def watch(name: str) -> Callable[..., int]:
        run = before[name]

        def watched(*arguments: Any) -> int:
            began = now()
            answer = run(*arguments)
            took = now() - began  # before anything else is done
            what, cost = _called(name, arguments)
            found = seen.setdefault(what, {"seconds": 0.0, "calls": 0, **dict.fromkeys(cost, 0)})
            for key, value in {"seconds": took, "calls": 1, **cost}.items():
                found[key] += value
            return answer

        watched.argtypes = ()  # type: ignore[attr-defined]  # what `entry` asks for
        return watched

    try:
        for name in before:
            setattr(lib, name, watch(name))
        yield
    finally:
        for name, run in before.items():
            setattr(lib, name, run)


def _called(name: str, arguments: Sequence[Any]) -> tuple[str, dict[str, float]]:
    """What a call of a kernel is called here, and its cost where that is known."""
    if name not in READS:
        return f"kernel: {name.removeprefix('residua_')}", {}
    kind = "read" if arguments[6] == 1 and not arguments[13] else "merge" if arguments[13] else "group of reads"
    multiplies, moved = _cost(READS[name], *arguments[:7])
    return f"{kind}, {READS[name]}", {"multiplies": multiplies, "bytes": moved}


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
    """Torch's own operations that take at least this share of all it saw, by name; the fastest of some runs. Products
    with their multiplications."""
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
    shown = {name: one for name, one in found.items() if one["seconds"] >= least * everything}
    if not PRODUCTS & shown.keys():
        return shown
    with torch.autograd.profiler.profile(with_flops=True) as seen:  # apart: to note shapes takes time
        form()
    for event in seen.key_averages():
        if event.key in PRODUCTS & shown.keys():
            shown[event.key]["multiplies"] = event.flops / 2
    return shown
