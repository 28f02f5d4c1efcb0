"""What commands share about their arguments: flags made from the fields of a recipe, grids, the command as typed."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from residua.lab.train.recipe import Field


def typed() -> str:
    """The running command as it would be typed again, `residua compare --plan ...`: every results file holds it."""
    return "residua " + shlex.join(sys.argv[1:])


def grid(flag: str, text: str) -> list[float]:
    """`1e-3,2e-3` as numbers; none for an empty text."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--{flag} {text}: write numbers separated by commas, such as 1e-3,2e-3") from None


def sign(command: Callable[..., None], fields: Mapping[str, Field], **own: tuple[Any, Any]) -> None:
    """Give a command the signature that typer reads: its own options, then a flag for every field."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for name, (kind, option) in own.items()
    ] + [_flag(field) for field in fields.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def read_settings(file: Path | None) -> dict[str, Any]:
    """The settings in a JSON or TOML file; none without a file."""
    if file is None:
        return {}
    import tomllib

    read = tomllib.loads if file.suffix == ".toml" else json.loads
    try:
        return dict(read(file.read_text()))
    except ValueError as error:
        raise ValueError(f"{file} is not {'TOML' if file.suffix == '.toml' else 'JSON'}: {error}") from None


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
