"""Designs by name: `register` one, `names` them, `build` one from `"attnres:block=8"`.

Those of the package are registered when the registry is first used.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TypeVar

from residua.options import options_of
from residua.plan import Plan
from residua.spec import Spec, parse
from residua.stream import Stream

Design = TypeVar("Design", bound=type[Stream])

_designs: dict[str, type[Stream]] = {}
_wrappers: dict[str, type[Stream]] = {}


def _fill() -> None:
    """Register the designs of the package, which come before all others; while they are being registered, nothing."""
    importlib.import_module("residua.streams")  # by name: a design imports this module


def register(name: str) -> Callable[[Design], Design]:
    """A class decorator that makes a `Stream` known as `name` in this process: to `build`, `names` and every law.

    Raises ValueError for a name that is taken, and for a class without a docstring or without `paper`.
    """

    def add(cls: Design) -> Design:
        _fill()
        if name in _designs:
            raise ValueError(f"design {name!r} is registered already, by {_designs[name].__qualname__}")
        if not (cls.__doc__ or "").strip():
            raise ValueError(f"design {name!r} needs a docstring whose first line is its equation")
        if not getattr(cls, "paper", ""):
            raise ValueError(f"design {name!r} needs `paper`: where its equation comes from")
        cls.name = name
        _designs[name] = cls
        return cls

    return add


def wraps(option: str) -> Callable[[Design], Design]:
    """A class decorator: every design takes `option`, and what was built is then wrapped, `cls.over(stream, value)`."""

    def add(cls: Design) -> Design:
        cls.name = option
        _wrappers[option] = cls
        return cls

    return add


def wrappers() -> dict[str, type[Stream]]:
    """What every design can be wrapped in, by the option that asks for it."""
    _fill()
    return dict(_wrappers)


def unregister(name: str) -> None:
    """Remove a design: for tests and notebooks that define one and run again. Raises ValueError for an unknown name."""
    design(name)
    del _designs[name]


def names() -> tuple[str, ...]:
    """Every registered design, in the order of registration, which is the order of the docs."""
    _fill()
    return tuple(_designs)


def design(name: str) -> type[Stream]:
    """The class registered as `name`. Raises ValueError for an unknown name, with the known ones."""
    _fill()
    if name not in _designs:
        near = difflib.get_close_matches(name, _designs, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown design {name!r}: {hint}choose from {', '.join(_designs)}")
    return _designs[name]


def build(spec: Spec, plan: Plan) -> Stream:
    """`build("attnres:block=8", plan)` is `AttnRes(plan, block=8)`.

    spec: a string, or the mapping that `Stream.config` gives.

    Raises ValueError for an unknown design, a value out of range or options that exclude each other, and TypeError for
    an unknown option.
    """
    name, options = parse(spec)
    name, options = design(name).upgraded(options)
    own = options_of(design(name))  # `ddl` has a `value` too, of other words
    worn = {
        key: options.pop(key)
        for key, wrapper in _wrappers.items()
        if key in options and (key not in own or options[key] in options_of(wrapper)[key].choices)
    }
    stream: Stream = design(name)(plan, **options)
    for key, value in worn.items():
        stream = _wrappers[key].over(stream, value)
    return stream
