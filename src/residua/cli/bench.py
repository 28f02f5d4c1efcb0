"""`residua bench`: how fast and how large, as ratios from one interleaved run with a control."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from residua.cli._spoken import spoken

KINDS = ("ops", "stack", "profile", "model", "memory", "decode")
DESIGNS = ("attnres:blocks=4", "delta:blocks=4", "delta", "ddl", "ddl:channels=4")
SUBJECTS = {
    "ops": (), "stack": ("attend",), "profile": ("attend",), "model": ("attend", "mix", "delta_write", "remix"),
    "memory": ("attend",), "decode": ("attend", "window_attend"),
}  # fmt: skip
"""The ops whose tests must be green before a file is written; for `ops`, those that were measured."""


def command(
    kind: str = typer.Argument(..., help="ops, stack, profile, model, memory or decode."),
    op: list[str] = typer.Option([], "--op", help="ops: which, such as attend or window_attend; repeat it. All else."),
    shape: list[str] = typer.Option([], "--shape", help="ops: TOKENSxWIDTH, such as 2048x256; repeat it."),
    count: list[int] = typer.Option([], "--count", "-n", help="ops: sources, values, streams or window; repeat it."),
    dtype: list[str] = typer.Option(["float32"], "--dtype", help="ops: float32 or bfloat16; repeat it."),
    compiled: bool = typer.Option(True, "--compiled/--no-compiled", help="ops: time Inductor's form too (slow start)."),
    design: list[str] = typer.Option(list(DESIGNS), "--design", "-d", help="model, memory, decode: repeat it."),
    depth: list[int] = typer.Option([], "--depth", help="Blocks; repeat it for stack and memory."),
    width: int = typer.Option(None, help="Width of the models and stacks."),
    tokens: int = typer.Option(None, help="Tokens a row."),
    rows: int = typer.Option(2, help="model: rows."),
    seconds: float = typer.Option(None, help="Budget of one interleaved run."),
    pairs: int = typer.Option(40, help="model: rounds at least."),
    attempts: int = typer.Option(3, help="model: runs until the control is within 2 %."),
    threads: int = typer.Option(1, help="Threads, and cores to pin to."),
    as_is: bool = typer.Option(False, "--as-is", help="Do not pin, nor set the allocator."),
    out: Path = typer.Option(None, "--out", "-o", help="Write the results here, if the tests of what ran are green."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure ops, stacks of reads and where their time goes, training steps, peak memory or decoding."""
    if kind not in KINDS:
        raise ValueError(f"residua bench measures {', '.join(KINDS)}, not {kind!r}")
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a directory; --out is a file, such as {out}/{kind}.json")
    from residua.lab.bench import gate, regime

    if out is not None:
        gate.tested_root()  # before minutes of measuring, not after
    if not as_is:
        regime.enter(regime.KEEP_PAGES, threads)
    import torch

    torch.set_num_threads(threads)
    cores = [] if as_is else regime.pin(threads)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "ops": lambda: _ops(op, shape, count, dtype, compiled, seconds or 2.0),
        "stack": lambda: _stack(depth or [6, 12, 24, 48], width or 256, tokens or 512, seconds or 20.0),
        "profile": lambda: _profile(depth, width or 256, tokens or 512),
        "model": lambda: _model(design, depth, width or 256, rows, tokens or 256, seconds or 60.0, pairs, attempts),
        "memory": lambda: _memory(design, depth or [6, 12, 24, 48], width or 256, tokens or 128),
        "decode": lambda: _decode(design, depth, width or 768, seconds or 30.0),
    }
    measured = {kind: run[kind]()}
    if out is not None:
        from residua.lab.bench import record

        subjects = {row["op"] for row in measured["ops"]["rows"]} if kind == "ops" else SUBJECTS[kind]
        record.write(out, measured, command=spoken(), regime=regime.describe(threads, cores), subjects=sorted(subjects))
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
        return
    from residua.lab.bench.table import sheets, show

    for sheet in sheets(measured):
        show(sheet)
    if out is not None:
        typer.echo(f"written: {out}")


def _ops(
    names: list[str], shapes: list[str], counts: list[int], dtypes: list[str], compiled: bool, seconds: float
) -> dict[str, Any]:
    import torch

    from residua.lab.bench.cases import GRIDS, cases
    from residua.lab.bench.ops import growth, measure

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    wrong = [name for name in dtypes if name not in kinds]
    if wrong:
        raise ValueError(f"--dtype is float32 or bfloat16, not {wrong[0]!r}")
    rows: list[dict[str, Any]] = []
    powers: dict[str, tuple[str, dict[str, float]]] = {}
    for name in names or GRIDS:
        for dtype in dtypes:
            found: list[dict[str, Any]] = []
            for case in cases(name, shapes, counts, kinds[dtype], compiled):
                _say(case.label())
                found.append(measure(case, seconds))
            rows += found
            over = "tokens" if name == "window_attend" else "n"
            power = growth(found, over)
            if power is not None:
                powers[f"{name} {dtype}"] = over, power
    return {"rows": rows, "growth": powers}


def _stack(depths: list[int], width: int, tokens: int, seconds: float) -> dict[str, Any]:
    from residua.lab.bench.stack import measure

    _say(f"stacks of {', '.join(map(str, depths))} blocks")
    return measure(depths, width, tokens, seconds)


def _profile(depth: list[int], width: int, tokens: int) -> dict[str, Any]:
    from residua.lab.bench.profile import measure

    _say("where the time of reads goes")
    return measure(_one(depth, 48), width, tokens)


def _model(
    designs: list[str], depth: list[int], width: int, rows: int, tokens: int, seconds: float, pairs: int, attempts: int
) -> dict[str, Any]:
    from residua.lab.bench.model import measure

    _say(f"training steps of standard and {', '.join(designs)}")
    return measure(
        designs, depth=_one(depth, 12), width=width, rows=rows, tokens=tokens, seconds=seconds, pairs=pairs,
        attempts=attempts,
    )  # fmt: skip


def _memory(designs: list[str], depths: list[int], width: int, tokens: int) -> dict[str, Any]:
    from residua.lab.bench.memory import measure

    _say(f"peak memory of standard and {', '.join(designs)}")
    return measure(designs, depths, width=width, tokens=tokens)


def _decode(designs: list[str], depth: list[int], width: int, seconds: float) -> dict[str, Any]:
    from residua.lab.bench.decode import measure

    _say(f"decoding with standard and {', '.join(designs)}")
    return measure(designs, depth=_one(depth, 12), width=width, seconds=seconds)


def _one(depth: list[int], default: int) -> int:
    if len(depth) > 1:
        raise ValueError("give one --depth here")
    return depth[0] if depth else default


def _say(text: str) -> None:
    typer.echo(f"measuring {text}", err=True)
