"""`residua checkpoint`: the checkpoints of a run, and the form they are saved in."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    run: Path = typer.Argument(help="Directory of a run."),
    form: str = typer.Option(None, "--form", metavar="one|pieces", help="Rewrite the newest checkpoint in this form."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the checkpoints of a run, or convert the newest between the sharded and the single-process form.

    one: model, optimizer and random state in a safetensors file each. pieces: one file per rank. Any number of ranks
    can read both.
    """
    from residua.cli._flags import show
    from residua.lab.common.locks import locked
    from residua.lab.train import checkpoint as checkpoints
    from residua.lab.train import sharded
    from residua.lab.train.folder import RunFolder

    if form not in (None, "one", "pieces"):
        raise ValueError(f"--form is one or pieces, not {form!r}")
    folder = RunFolder(run).checkpoints
    steps = checkpoints.steps(folder)
    if not steps:
        raise FileNotFoundError(f"{run} holds no checkpoint; train there first")
    if form is not None:
        with locked(run):
            newest = folder / checkpoints.name(steps[-1])
            if sharded.describe(newest)["form"] != form:
                sharded.rewritten(newest, pieces=form == "pieces")
    found = [
        {"checkpoint": checkpoints.name(step), **sharded.describe(folder / checkpoints.name(step))} for step in steps
    ]
    show(found, as_json, _page)


def _page(found: list[dict[str, object]]) -> None:
    for each in found:
        written = "single-process" if each["form"] == "one" else f"sharded over {each['ranks']} ranks"
        typer.echo(f"{each['checkpoint']}  {written}, {each['bytes']:,} bytes")
