"""What commands share: flags made from the fields of a recipe, grids, the command as typed, JSON or a page, a bar, and
the display and exit code of a run."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residua.lab.common.files import Values
from residua.lab.train.recipe import Field

if TYPE_CHECKING:
    import torch

    from residua.lab.train.display import Display

MOST_SEEDS = 10_000
"""Of one comparison."""

Option = tuple[type, object]
"""The kind of a flag, and what `typer.Option` made of it."""


def typed() -> str:
    """The running command as it would be typed again, `residua compare --plan ...`: every results file holds it."""
    return "residua " + shlex.join(sys.argv[1:])


def grid(flag: str, text: str) -> list[float]:
    """`1e-3,2e-3` as numbers; none for an empty text."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--{flag} {text}: write numbers separated by commas, such as 1e-3,2e-3") from None


def tell(text: str) -> None:
    """A line that is no result: on stderr."""
    typer.echo(text, err=True)


def show(found: object, as_json: bool, page: Callable[..., None]) -> None:
    """A result as JSON, or as `page` prints it."""
    typer.echo(json.dumps(found, indent=2)) if as_json else page(found)


def dtype_of(name: str, *known: str) -> torch.dtype:
    """The type that --dtype names."""
    import torch

    if name not in known:
        raise ValueError(f"--dtype is {', '.join(known)}, not {name!r}")
    return getattr(torch, name)


def sign(command: Callable[..., None], fields: Mapping[str, Field], **own: Option) -> None:
    """Give a command the signature that typer reads: its own options, then a flag for every field."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for name, (kind, option) in own.items()
    ] + [_flag(field) for field in fields.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def read_settings(file: Path | None) -> Values:
    """The settings in a JSON or TOML file; none without a file."""
    if file is None:
        return {}
    import tomllib

    read = tomllib.loads if file.suffix == ".toml" else json.loads
    try:
        found = read(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not {'TOML' if file.suffix == '.toml' else 'JSON'}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f'{file} holds a {type(found).__name__}; write an object of settings, such as {{"steps": 500}}'
        )
    return found


def path_option(default: object, *names: str, **options: Any) -> Any:
    """An option that takes a path, and not an empty one: that would be the folder where the command happens to run."""
    return typer.Option(default, *names, parser=_path, metavar="PATH", **options)


def _path(text: str | Path) -> Path:
    if not str(text).strip() or "\0" in str(text):
        raise ValueError("a path is empty; give one, such as runs/a")
    return Path(text)


OWN = ("config.json", "manifest.json", "tokenizer.json", "metrics.jsonl", "result.json", "routing.json", "run.lock",
       "plan.json", "results.json", "conversions.json", "figures.json", "hardware.json", "diverged.json",
       "state.json")  # fmt: skip
"""What runs and comparisons keep under these names: no output of another command may take their place."""


def refuse_output(file: Path | None, *endings: str) -> None:
    """Refuse a file to be written that is a folder, has another ending, or belongs to a run."""
    if file is None:
        return
    if file.is_dir():
        raise ValueError(f"{file} is a directory; --out takes a file, such as {file / ('out' + endings[0])}")
    if file.suffix.lower() not in endings:
        raise ValueError(f"{file} does not end in {' or '.join(endings)}, which is what would be written there")
    if file.name in OWN:
        raise ValueError(f"{file.name} is what a run or a comparison keeps under that name; name another file")
    if file.parent.exists() and not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a directory")


def _flag(field: Field) -> inspect.Parameter:
    """One flag: None unless given, so that flags override the config file and nothing else does."""
    name = f"--{field.name.replace('_', '-')}"
    default = str(field.default).lower() if field.kind is bool else field.default
    shown = "" if default is None else f" [default: {default}]"
    option = typer.Option(
        None,
        f"{name}/--no-{name[2:]}" if field.kind is bool else name,
        help=field.help + shown,
        metavar=None if field.kind is bool else field.describe() if field.choices else field.kind.__name__.upper(),
        show_default=False,
    )
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=field.kind | None)


def run_flags() -> dict[str, Option]:
    """Output directory, settings file, resuming and tracking, for `sign`."""
    return {
        "out": (Path, path_option(None, "--out", help="Output directory of the run.")),
        "config": (
            Path,
            path_option(None, "--config", help="JSON or TOML file with these settings; flags override it."),
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
