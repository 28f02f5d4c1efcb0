"""expect(where, value, SHAPE): what a file holds has the keys and kinds that are going to be read from it.

    float                    a number; int, str, bool, dict and list are themselves
    {"loss": float}          an object with at least these keys; "lr?" may be absent
    [int]                    a list of them
    (str, None)              either of them

The first thing that is not so is one error: the file, the place in it, and what should be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residua.lab.common.files import Values, read_json

Shape = Any
"""As above."""

_NAMES: dict[type | None, str] = {
    float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "an object", list: "a list",
    None: "null",
}  # fmt: skip


def read_expected(path: Path, shape: Mapping[str, Shape]) -> Values:
    """The object in a JSON file, if it has this shape."""
    value = read_json(path)
    expect(path, value, shape)
    return value


def expect(where: object, value: object, shape: Shape, place: str = "") -> None:
    """Raise ValueError unless a value has a shape."""
    if isinstance(shape, tuple):
        if not any(_fits(value, one) for one in shape):
            raise ValueError(f"{where}: {place or 'it'} is {_shown(value)}, not {' or '.join(map(_name, shape))}")
        shape = next(one for one in shape if _fits(value, one))
    if not _fits(value, shape):
        raise ValueError(f"{where}: {place or 'it'} is {_shown(value)}, not {_name(shape)}")
    if isinstance(shape, dict) and isinstance(value, Mapping):
        for key, inner in shape.items():
            name, optional = key.removesuffix("?"), key.endswith("?")
            here = f"{place}.{name}" if place else name
            if name in value:
                expect(where, value[name], inner, here)
            elif not optional:
                raise ValueError(f"{where} has no {here}; it is not the file it should be, or it is damaged")
    if isinstance(shape, list) and isinstance(value, list):
        for index, one in enumerate(value):
            expect(where, one, shape[0], f"{place}[{index}]")


def _fits(value: object, shape: Shape) -> bool:
    """Whether a value is of the kind of a shape, whatever is inside."""
    if shape is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if shape is int:
        return type(value) is int
    if shape is None:
        return value is None
    return isinstance(value, shape if isinstance(shape, type) else type(shape))


def _name(shape: Shape) -> str:
    return _NAMES[shape if shape is None or isinstance(shape, type) else type(shape)]


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
