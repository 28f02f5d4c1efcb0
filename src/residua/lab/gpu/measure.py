"""The tables of docs/speed.md on a GPU, by the measurements that made them on a processor: one file to send back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from residua import ops
from residua.lab.bench import decode, model, stack
from residua.lab.bench.cases import GRIDS, cases
from residua.lab.bench.device import measuring_on
from residua.lab.bench.ops import growth
from residua.lab.bench.ops import measure as measure_op
from residua.lab.bench.timing import STANDARD, Measured, exponent, interleave
from residua.lab.common.files import versions
from residua.lab.gpu.check import SHAPES, check

PUBLISHED = (8192, 7168, 9)
PUBLIC = {"fla": 1027, "vLLM": 468, "FlagGems": 398}
"""Microseconds of one forward read of that size (tokens, width, sources) in bfloat16 on an H100, as others report."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: as the tables say, or less of it."""

    designs: tuple[str, ...] = ("attnres:blocks=4", "delta:blocks=4", "attnres", "delta", "mudd", "mhc", "ddl")
    checked: tuple[tuple[int, int, int], ...] = SHAPES
    read: tuple[int, int, int] = PUBLISHED
    ops: tuple[str, ...] = tuple(GRIDS)
    shapes: tuple[str, ...] = ("8192x1024", "8192x4096")
    counts: tuple[int, ...] = (4, 8, 24)
    types: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    depths: tuple[int, ...] = (12, 24, 48)
    width: int = 1024
    tokens: int = 1024
    rows: int = 4
    contexts: tuple[int, ...] = (1024, 32768)
    seconds: float = 5.0


def measure(device: torch.device, sizes: Sizes, tell: Callable[[str], None]) -> Measured:
    """Correctness first; then one large read, single ops, stacks of reads, training steps, memory and decoding."""
    tell("checking every kernel against float64")
    found: Measured = {"device": describe(device), "check": check(device, sizes.checked)}
    parts: dict[str, Callable[[], Measured]] = {
        "read": lambda: _read(sizes, device),
        "ops": lambda: _ops(sizes, tell),
        "stack": lambda: stack.measure(sizes.depths, sizes.width, sizes.tokens, sizes.seconds, sizes.types),
        "model": lambda: model.measure(
            sizes.designs, depth=sizes.depths[0], width=sizes.width, rows=sizes.rows, tokens=sizes.tokens,
            seconds=4 * sizes.seconds, pairs=5, attempts=2,
        ),
        "decode": lambda: decode.measure(
            sizes.designs, depth=sizes.depths[0], width=sizes.width, seconds=4 * sizes.seconds, contexts=sizes.contexts
        ),
    }  # fmt: skip
    if device.type == "cuda":
        parts["memory"] = lambda: _memory(sizes, device)
    with measuring_on(device):
        for name, part in parts.items():
            tell(f"measuring {name}")
            found[name] = part()
    return found


def describe(device: torch.device) -> Measured:
    """What it is that was measured."""
    if device.type != "cuda":
        return {"name": "Triton's interpreter", **versions()}
    known = torch.cuda.get_device_properties(device)
    return {
        "name": known.name, "capability": f"{known.major}.{known.minor}", "bytes": known.total_memory,
        "processors": known.multi_processor_count, "cuda": torch.version.cuda, "hip": torch.version.hip, **versions(),
    }  # fmt: skip


def _read(sizes: Sizes, device: torch.device) -> Measured:
    """One read at the size that others report, forward, beside a plain sum over as many bytes."""
    tokens, width, n = sizes.read
    query = torch.randn(width, device=device)
    sources = tuple(torch.randn(1, tokens, width, device=device).bfloat16() for _ in range(n))
    moved = (n + 1) * tokens * width * 2
    plain = torch.ones(max(1, moved // 4), device=device)
    with torch.no_grad():
        timing = interleave(
            {"read": lambda: ops.attend(query, sources), "sum": plain.sum}, controlled="read", seconds=sizes.seconds
        )
    return {
        "tokens": tokens, "width": width, "n": n, "bytes": moved, "public": PUBLIC if sizes.read == PUBLISHED else {},
        "microseconds": 1e6 * timing.typical("read"), "share": timing.typical("sum") / timing.typical("read"),
        "control": timing.ratio("read", "sum", "read").control,
    }  # fmt: skip


def _ops(sizes: Sizes, tell: Callable[[str], None]) -> Measured:
    rows: list[Measured] = []
    powers: dict[str, tuple[str, dict[str, float]]] = {}
    for name in sizes.ops:
        for dtype in sizes.types:
            found = []
            for case in cases(name, sizes.shapes, sizes.counts, dtype, False):
                tell(f"measuring {case.label()}")
                found.append(measure_op(case, sizes.seconds / 5))
            rows += found
            power = growth(found, "n")
            if power is not None:
                powers[f"{name} {str(dtype).removeprefix('torch.')}"] = "n", power
    return {"rows": rows, "growth": powers}


def _memory(sizes: Sizes, device: torch.device) -> Measured:
    """Of the allocator's blocks in use, the most above those of the model and its inputs."""

    def peak(design: str, depth: int) -> int:
        step = model.step(design, depth, sizes.width, 1, sizes.tokens)
        step()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before

    found = {name: [peak(name, depth) for depth in sizes.depths] for name in dict.fromkeys((STANDARD, *sizes.designs))}
    return {
        "width": sizes.width, "tokens": sizes.tokens, "depths": list(sizes.depths), "bytes": found,
        "ratios": {
            name: [mine / base for mine, base in zip(one, found[STANDARD], strict=True)]
            for name, one in found.items() if name != STANDARD
        },
        "growth": {name: exponent(sizes.depths, one) for name, one in found.items()} if len(sizes.depths) > 1 else {},
    }  # fmt: skip
