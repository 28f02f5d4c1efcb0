"""What the commands that train share: the flags of a run, its display, and how one that stops short ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from residua.lab.train.display import Display


def run_flags() -> dict[str, tuple[Any, Any]]:
    """Where a run is written, what it is made from, how it goes on and who follows it, for `sign`."""
    return {
        "out": (Path, typer.Option(None, "--out", help="Directory of the run.")),
        "config": (Path, typer.Option(None, "--config", help="JSON or TOML file of these settings; flags go over it.")),
        "resume": (str, typer.Option("auto", "--resume", metavar="auto|never|must", help="Continue what is in --out.")),
        "track": (list[str], typer.Option([], "--track", help="tensorboard, trackio or wandb; may be repeated.")),
    }


@contextmanager
def running(out: Path | None) -> Iterator[Display]:
    """Show a run into `out`. One that stops short is a line on stderr: told to, its signal's exit code; failed, 1."""
    from residua.lab.train import Diverged, Interrupted
    from residua.lab.train.display import Display

    if out is None:
        raise ValueError("--out is missing: name a directory for the run, such as --out runs/a")
    try:
        with Display() as display:
            yield display
    except Interrupted as stopped:
        typer.echo(f"residua: {stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    except (Diverged, ImportError) as failed:
        typer.echo(f"residua: {failed}", err=True)
        raise typer.Exit(1) from None
