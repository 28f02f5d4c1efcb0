"""What the commands that train share: the flags of a run, its display, and the exit code of one that stops early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from residua.lab.train.display import Display


def run_flags() -> dict[str, tuple[Any, Any]]:
    """Output directory, settings file, resuming and tracking, for `sign`."""
    return {
        "out": (Path, typer.Option(None, "--out", help="Output directory of the run.")),
        "config": (
            Path,
            typer.Option(None, "--config", help="JSON or TOML file with these settings; flags override it."),
        ),
        "resume": (str, typer.Option("auto", "--resume", metavar="auto|never|must", help="Resume the run in --out.")),
        "track": (list[str], typer.Option([], "--track", help="Log to tensorboard, trackio or wandb; repeatable.")),
    }


@contextmanager
def running(out: Path | None) -> Iterator[Display]:
    """Display a run. An early stop is one line on stderr; the exit code is that of the signal, or 1 for a failure."""
    from residua.lab.train import Diverged, Interrupted
    from residua.lab.train.display import Display

    if out is None:
        raise ValueError("--out is missing: give the output directory of the run, such as --out runs/a")
    try:
        with Display() as display:
            yield display
    except Interrupted as stopped:
        typer.echo(f"residua: {stopped}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    except (Diverged, ImportError) as failed:
        typer.echo(f"residua: {failed}", err=True)
        raise typer.Exit(1) from None
