"""`residua report`: one page of a comparison or of runs, to open from a file: no server, no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., help="A directory of residua compare, or one or more of residua train."),
    out: Path = typer.Option(None, "--out", "-o", help="The page to write; report.html in the directory by default."),
    prompt: str = typer.Option(None, "--prompt", "-p", help="The text whose tokens are followed through every model."),
    checkpoints: bool = typer.Option(True, help="Load the models: tokens, gradients and attention need them."),
    as_json: bool = typer.Option(False, "--json", help="Print what the page shows as JSON, and write no page."),
) -> None:
    """Write one self-contained HTML page: results, curves, the routing explorer, depth, costs, and how to repeat it."""
    from residua.lab import report

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            typer.echo(text, err=True)

    text = report.PROMPT if prompt is None else prompt
    if as_json:
        typer.echo(json.dumps(report.gather(*runs, prompt=text, checkpoints=checkpoints, progress=tell)))
        return
    path = report.write(*runs, out=out, prompt=text, checkpoints=checkpoints, progress=tell)
    typer.echo(f"report: {path}")
