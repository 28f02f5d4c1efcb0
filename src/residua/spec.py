"""`name:key=value,key=value`: how a design is written on a command line, in a plan file and in a checkpoint.

`parse` gives the name and a dict of typed values; `render` is its inverse; the JSON form is
`{"name": "attnres", "block": 8}`. Values are numbers, `true` / `false`, or bare words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Value = bool | int | float | str
Spec = str | Mapping[str, Any]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_INT = re.compile(r"[+-]?\d+")


def parse_value(text: str) -> Value:
    """The typed value of one option: a bool, an int, a float or a word."""
    text = text.strip()
    if text in ("true", "True"):
        return True
    if text in ("false", "False"):
        return False
    if _INT.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        pass
    if not _WORD.fullmatch(text):
        raise ValueError(f"option value {text!r} is neither a number, true, false nor a word")
    return text


def render_value(value: Value) -> str:
    """The text that `parse_value` reads back as `value`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def parse(spec: Spec) -> tuple[str, dict[str, Value]]:
    """The design's name and its options, from a spec string or its JSON form."""
    if isinstance(spec, Mapping):
        options = dict(spec)
        try:
            name = options.pop("name")
        except KeyError:
            raise ValueError(f'a design in JSON form needs a "name": {dict(spec)!r}') from None
        for key, value in options.items():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{name}: option {key} is {value!r}; options are numbers, booleans or words")
        return str(name), options
    name, colon, rest = spec.strip().partition(":")
    if not _WORD.fullmatch(name):
        raise ValueError(f"design {spec!r}: write name or name:key=value,key=value")
    options = {}
    if colon and not rest:
        raise ValueError(f"design {spec!r} ends in a colon; write {name} or {name}:key=value")
    for pair in rest.split(",") if rest else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise ValueError(f"design {spec!r}: {pair!r} is not key=value")
        if key in options:
            raise ValueError(f"design {spec!r} gives {key!r} twice")
        options[key] = parse_value(value)
    return name, options


def render(name: str, options: Mapping[str, Value]) -> str:
    """The spec string of a name and its options, in the order given."""
    pairs = ",".join(f"{key}={render_value(value)}" for key, value in options.items())
    return f"{name}:{pairs}" if pairs else name
