"""What `residua doctor` and `residua bench` do on a GPU, and what a compiler says of its kernels without one."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from residua.cli._flags import tell, typed
from residua.lab.common.files import Values, write_text

OUT = Path("residua-gpu.json")
"""Where the tables go unless told otherwise: the file to send back."""


def doctor(device: str) -> Values:
    """Every kernel against float64, on a device."""
    from residua.lab.gpu.check import check, failed, require
    from residua.lab.gpu.measure import describe

    found = require(device)
    tell("checking every kernel against float64")
    rows = check(found)
    return {"device": describe(found), "check": rows, "failed": failed(rows)}


def show_check(found: Values) -> None:
    """The rows, and what is wrong."""
    from residua.lab.bench.table import sheets, show

    typer.echo(f"device       {found['device']['name']}")
    for sheet in sheets({"check": found["check"]}):
        show(sheet)
    typer.echo("\n".join(found["failed"]) or f"all {len(found['check'])} checks are right")


def bench(device: str, out: Path | None, as_json: bool) -> None:
    """Correctness, then every table, into a file; a kernel that is wrong ends it with code 1 and is in the file."""
    from residua.lab.bench import record
    from residua.lab.gpu.check import failed, require
    from residua.lab.gpu.measure import Sizes, measure

    measured = measure(require(device), Sizes(), tell)
    out = OUT if out is None else out
    write_text(out, json.dumps({"format": record.FORMAT, "command": typed(), **measured}, indent=2) + "\n")
    wrong = failed(measured["check"])
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
    else:
        from residua.lab.bench.table import sheets, show

        for sheet in sheets(measured):
            show(sheet)
        typer.echo("\n".join([*wrong, f"written: {out}"]))
    if wrong:
        raise typer.Exit(1)


def kernels(out: Path | None, as_json: bool) -> None:
    """The table of what every kernel takes of four kinds of GPU, compiled and not run."""
    from residua.extras import need
    from residua.lab.bench.table import sheets, show
    from residua.lab.gpu.compiled import measure, write

    need("triton", "triton")
    tell("compiling every kernel for four kinds of GPU")
    measured = measure()
    if out is not None:
        write(out, measured, typed())
    if as_json:
        typer.echo(json.dumps(measured, indent=2))
        return
    for sheet in sheets({"kernels": measured}):
        show(sheet)
    if out is not None:
        typer.echo(f"written: {out}")
