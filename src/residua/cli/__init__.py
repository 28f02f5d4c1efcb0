"""The command line. A command is one file in this folder with a function `command`; its name is the file's.

Heavy packages are imported inside the functions, so that `residua --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import typer

from residua._version import __version__

app = typer.Typer(
    help="Residual-stream designs for Transformers: train, compare, convert checkpoints, inspect routing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"residua {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for _found in pkgutil.iter_modules(__path__):
    if not _found.name.startswith("_"):
        app.command(_found.name)(importlib.import_module(f"{__name__}.{_found.name}").command)


def main() -> None:
    """Run the command line. A mistake in the input is one line on stderr and exit code 2, not a traceback.

    RESIDUA_TRACEBACK=1 shows where it came from.
    """
    shown = os.environ.get("RESIDUA_TRACEBACK", "") not in ("", "0")
    try:
        app()
    except (ValueError, TypeError, OSError, MemoryError) as error:
        if shown:
            raise
        typer.echo(f"residua: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        sys.exit(2)
