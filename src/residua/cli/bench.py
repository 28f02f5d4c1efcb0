"""`residua bench`: speed and memory, as ratios from one interleaved run with a control."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from itertools import product
from pathlib import Path

import typer

from residua.cli import _device
from residua.cli._flags import dtype_of, path_option, refuse_output, tell, typed
from residua.lab.common.files import Values

KINDS = ("ops", "stack", "profile", "model", "memory", "decode", "compiled", "plain", "kernels", "all")
DESIGNS = ("delta:blocks=4", "attnres:blocks=4", "delta", "ddl", "ddl:channels=4")
DEPTHS = (6, 12, 24, 48)


def command(
    kind: str = typer.Argument(None, help=f"What to measure: {', '.join(KINDS[:-1])} or {KINDS[-1]}."),
    op: list[str] = typer.Option([], "--op", help="ops: op, such as attend; repeatable. All by default."),
    shape: list[str] = typer.Option(
        [], "--shape", help="ops: TOKENSxWIDTH, such as 2048x256; plain: DEPTHxWIDTH, such as 6x64; repeatable."
    ),
    count: list[int] = typer.Option(
        [], "--count", "-n", help="ops: number of sources, channels or streams, or window size; repeatable."
    ),
    dtype: list[str] = typer.Option(["float32"], "--dtype", help="ops: float32 or bfloat16; repeatable."),
    compiled: bool = typer.Option(
        None,
        "--compiled/--no-compiled",
        help="ops: include torch.compile (slow to start). By default at some counts of each op.",
        show_default=False,
    ),
    design: list[str] = typer.Option(
        [],
        "--design",
        "-d",
        help="model, memory, decode, compiled, profile: design; repeatable. By default every design; "
        "memory, decode: some with block and full reads, and ddl.",
    ),
    depth: list[int] = typer.Option([], "--depth", help="Number of blocks; repeatable for stack and memory."),
    width: int = typer.Option(None, help="Model width."),
    tokens: int = typer.Option(None, help="Sequence length in tokens."),
    rows: int = typer.Option(2, help="model, compiled: batch size."),
    seconds: float = typer.Option(None, help="Time limit of one interleaved run."),
    pairs: int = typer.Option(20, help="model, compiled: minimum number of rounds."),
    attempts: int = typer.Option(2, help="model: repeat the rounds, at most this many times, until A/A is within 1 %."),
    quick: bool = typer.Option(False, "--quick", help="plain: one tiny shape, to see that everything runs."),
    threads: int = typer.Option(1, help="Number of threads, and of cores to pin to."),
    as_is: bool = typer.Option(False, "--as-is", help="Neither pin cores nor configure the allocator."),
    out: Path = path_option(
        None, "--out", "-o", help="JSON file to write, if the tests of the measured ops pass; all: directory of files."
    ),
    compile_only: bool = typer.Option(
        False, "--compile-only", help="ops, compiled, all: compile what would be timed into Inductor's cache, and end."
    ),
    resume: bool = typer.Option(False, "--resume", help="all: keep files measured with the present sources."),
    device: str = typer.Option(
        "cpu", "--device", help="cuda: check every kernel, then measure all tables, into one file to send back."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure the speed of ops, of depth reads, training steps (compiled too) and decoding, or peak memory; or, with
    plain, the standard network against transformers' Llama and a plain form in PyTorch.

    `residua bench all --out results/bench` measures every table in turn; on a quiet core that takes some 40 minutes.
    `residua bench --device cuda` is all of it on a GPU. `residua bench kernels` compiles the kernels for four kinds of
    GPU, which takes none.
    """
    if device != "cpu":
        if kind is not None:
            raise ValueError(f"residua bench --device {device} measures everything; leave out {kind!r}")
        refuse_output(out, ".json")
        _device.bench(device, out, as_json)
        return
    if kind == "kernels":
        refuse_output(out, ".json")
        _device.kernels(out, as_json)
        return
    if kind == "all":
        _all(out, resume, compile_only)
        return
    if kind not in KINDS:
        raise ValueError(
            f"residua bench needs what to measure: {', '.join(KINDS)}" + (f", not {kind!r}" if kind else "")
        )
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    refuse_output(out, ".json")
    if kind in ("profile", "model", "decode", "compiled") and len(depth) > 1:
        raise ValueError(f"residua bench {kind} takes one --depth, not {len(depth)}")
    from residua.lab.bench import everything, record, regime

    if out is not None:
        record.tested_root()  # before minutes of measuring, not after
    if compile_only and (kind not in everything.COMPILING or out is not None):
        raise ValueError("--compile-only measures nothing: give it to ops, compiled or all, without --out")
    if not (as_is or compile_only):
        regime.enter(regime.GLIBC if kind == "plain" else regime.KEEP_PAGES, threads)
    import torch

    import residua
    from residua.lab.bench import compiled as compiled_steps
    from residua.lab.bench import decode, memory, model, plain, profile, stack
    from residua.lab.bench.targets import STEPS

    torch.set_num_threads(threads)
    cores = [] if as_is or compile_only else regime.pin(threads)
    first = depth[0] if depth else None
    standard, *others = residua.names()
    every = {
        "compiled": [standard, *others],
        "model": list(dict.fromkeys((*DESIGNS, "attnres", *others))),
        "profile": list(STEPS),
    }
    design = design or every.get(kind, list(DESIGNS))
    shaped = {"depth": first or 2, "width": width or 256, "rows": rows, "tokens": tokens or 256}
    if compile_only:
        if kind == "ops":
            _compile(op, shape, count, dtype, compiled)
        else:
            deque(compiled_steps.compiled(design, **shaped, tell=tell), maxlen=0)
        return
    run: dict[str, Callable[[], Values]] = {
        "ops": lambda: _ops(op, shape, count, dtype, compiled, seconds or 2.0),
        "stack": lambda: stack.measure(depth or list(DEPTHS), width or 256, tokens or 512, seconds or 8.0),
        "profile": lambda: profile.measure(
            first or 48, width or 256, tokens or 512, design,
            {"depth": first or 12, "width": width or 256, "rows": rows, "tokens": tokens or 256},
            seconds or 6.0,
            dict.fromkeys(
                plain.Shape(first or deep, width or wide, tokens or context)
                for deep, wide in plain.SHAPES for context in plain.CONTEXTS
            ),
        ),
        "model": lambda: model.measure(
            design, depth=first or 12, width=width or 256, rows=rows, tokens=tokens or 256, seconds=seconds or 10.0,
            pairs=pairs, attempts=attempts, tell=tell,
        ),
        "memory": lambda: memory.measure(
            design, depth or list(DEPTHS), width=width or 256, lengths=(tokens,) if tokens else memory.LENGTHS
        ),
        "decode": lambda: decode.measure(design, depth=first or 12, width=width or 768, seconds=seconds or 15.0),
        "plain": lambda: _plain(shape, tokens, seconds or 6.0, quick),
        "compiled": lambda: compiled_steps.measure(
            design, **shaped, seconds=seconds or 4.0, pairs=pairs, tell=tell
        ),
    }  # fmt: skip
    with_designs = f" of standard, {', '.join(design)}" if kind in ("memory", "decode") else ""
    tell(f"measuring {kind}{with_designs}")
    measured = {"regime": regime.describe(threads, cores), kind: run[kind]()}
    if out is not None:
        passed = record.check(sorted(everything.subjects(measured)))
        record.write(out, measured, command=typed(), passed=passed)
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
        return
    from residua.lab.bench.table import sheets, show

    for sheet in sheets(measured):
        show(sheet)
    if out is not None:
        typer.echo(f"written: {out}")


def _all(folder: Path | None, resume: bool, compile_only: bool) -> None:
    """Every kind but `kernels`, which times nothing."""
    from residua.lab.bench import everything, record
    from residua.lab.bench.table import sheets, show

    if compile_only:
        _end(everything.compile(tell))
        return
    if folder is None:
        raise ValueError("residua bench all takes a directory for its files: --out results/bench")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; residua bench all writes several, into a directory")
    record.tested_root()

    def shown(measured: Values) -> None:
        for sheet in sheets(measured):
            show(sheet)

    _end(everything.measure(folder, resume=resume, tell=tell, show=shown))


def _end(failed: list[str]) -> None:
    """Code 1 if something failed, which has said why."""
    if failed:
        tell(f"residua: not measured: {', '.join(failed)}")
        raise typer.Exit(1)


def _plain(shapes: list[str], tokens: int | None, seconds: float, quick: bool) -> Values:
    from residua.lab.bench import plain

    if quick:
        return plain.measure(((1, 32),), (8,), vocabulary=64, seconds=0.0, least=1)
    asked = [plain.parse_shape(one) for one in shapes] or plain.SHAPES
    return plain.measure(asked, (tokens,) if tokens else plain.CONTEXTS, seconds=seconds, say=tell)


def _compile(names: list[str], shapes: list[str], counts: list[int], dtypes: list[str], compiled: bool | None) -> None:
    from residua.lab.bench.cases import GRIDS, cases
    from residua.lab.bench.ops import compile

    for name, dtype in product(names or GRIDS, dtypes):
        for case in cases(name, shapes, counts, dtype_of(dtype, "float32", "bfloat16"), compiled):
            tell(f"compiling {case.label()}")
            compile(case)


def _ops(
    names: list[str], shapes: list[str], counts: list[int], dtypes: list[str], compiled: bool | None, seconds: float
) -> Values:
    from residua.lab.bench.cases import GRIDS, cases
    from residua.lab.bench.ops import growth, measure

    kinds = {name: dtype_of(name, "float32", "bfloat16") for name in dtypes}
    rows: list[Values] = []
    powers: dict[str, tuple[str, dict[str, float]]] = {}
    for name in names or GRIDS:
        for dtype in dtypes:
            found: list[Values] = []
            for case in cases(name, shapes, counts, kinds[dtype], compiled):
                tell(f"measuring {case.label()}")
                found.append(measure(case, seconds))
            rows += found
            over = "tokens" if name == "window_attend" else "n"
            power = growth(found, over)
            if power is not None:
                powers[f"{name} {dtype}"] = over, power
    return {"rows": rows, "growth": powers}
