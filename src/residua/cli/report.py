"""`residua report`: one page of a comparison or of runs, to open from a file: no server, no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from residua.cli._flags import path_option, refuse_output


def command(
    runs: list[Path] = typer.Argument(
        ..., help="Output directory of residua compare, or one or more of residua train."
    ),
    out: Path = path_option(None, "--out", "-o", help="HTML file to write; report.html in the directory by default."),
    prompt: str = typer.Option(None, "--prompt", "-p", help="Text whose tokens are shown for every model."),
    checkpoints: bool = typer.Option(True, help="Load checkpoints, for per-token routing, gradients and attention."),
    ablate: bool = typer.Option(
        False, "--ablate", help="Also measure the loss without each source of each site: a forward pass for each."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the data of the page as JSON instead."),
) -> None:
    """Write a self-contained HTML report: results, curves, routing, costs, and the commands to reproduce it."""
    refuse_output(out, ".html", ".htm")
    from residua.lab import report

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            typer.echo(text, err=True)

    text = report.PROMPT if prompt is None else prompt
    if as_json:
        found = report.gather(*runs, prompt=text, checkpoints=checkpoints, ablate=ablate, progress=tell)
        typer.echo(json.dumps(found))
        return
    path = report.write(*runs, out=out, prompt=text, checkpoints=checkpoints, ablate=ablate, progress=tell)
    typer.echo(f"report: {path}")
