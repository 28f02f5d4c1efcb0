"""Constructor keywords as configuration: which options a design has, their kinds, and checking values.

An option is annotated with `bool`, `int`, `float`, a `Literal` of words, or one of these `| None`.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from residua.spec import Value

MOST = 1 << 24
"""The largest whole number that an option takes: a window over the longest context."""
MOST_ROUNDS = 1000
"""Rounds of an iteration inside every read; papers use 20."""


class Option(NamedTuple):
    """One keyword of a constructor."""

    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    """The words a `Literal` allows; empty for the other kinds."""
    default: Value | None

    def describe(self) -> str:
        """What a user may write."""
        if self.choices:
            return "|".join(self.choices)
        return {bool: "true|false", int: "whole number", float: "number"}[self.kind]


@cache
def options_of(cls: type) -> dict[str, Option]:
    """The keyword-only parameters of `cls.__init__`, by name."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    return {
        name: _option(cls, name, hints[name], parameter.default)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()  # type: ignore[misc]
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check_options(cls: type, options: Mapping[str, Value]) -> None:
    """Raise one error that names the option, the value and what would be right."""
    known = options_of(cls)
    design = getattr(cls, "name", cls.__name__)
    for key, value in options.items():
        if key not in known:
            raise TypeError(_unknown(design, key, known, getattr(cls, "refuses", {})))
        option = known[key]
        if value is None and option.default is None:
            continue
        right = type(value) is option.kind or (option.kind is float and type(value) is int)
        if not right or (option.choices and value not in option.choices):
            raise ValueError(f"{design}: {key} takes {option.describe()}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{design}: {key} must be finite, not {value}")
        most = MOST_ROUNDS if key == "iterations" else MOST
        if type(value) is int and abs(value) > most:
            raise ValueError(f"{design}: {key} is at most {most:,}, not {value:,}")
        if key == "eps" and not 0 <= float(value) < 1:
            raise ValueError(f"{design}: eps takes a number from 0 to below 1, not {value!r}")


def _option(cls: type, name: str, hint: object, default: Value | None) -> Option:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return Option(str, get_args(hint), default)
    if hint in (bool, int, float):
        return Option(hint, (), default)
    raise TypeError(f"{cls.__name__}: annotate option {name} with bool, int, float or a Literal, not {hint!r}")


def _unknown(design: str, key: str, known: Mapping[str, Option], refuses: Mapping[str, str]) -> str:
    if key in refuses:
        return f"{design} has no option {key!r}: {refuses[key]}"
    if not known:
        return f"{design} has no option {key!r}; it has no options"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{design} has no option {key!r}{hint} (options: {', '.join(known)})"
