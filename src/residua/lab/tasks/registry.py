"""Tasks by name: `register` one, `names` them, `get` a class, `build` one from `"khop:hops=3"`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TypeVar

from residua.lab.tasks.task import Task
from residua.options import check_options
from residua.spec import Spec, parse

Kind = TypeVar("Kind", bound=type[Task])

_tasks: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a `Task` subclass known as `name`; it must say in its docstring and in `separates` what it is for."""

    def add(cls: Kind) -> Kind:
        if name in _tasks:
            raise ValueError(f"task {name!r} is registered already, by {_tasks[name].__qualname__}")
        if not (cls.__doc__ or "").strip():
            raise ValueError(f"task {name!r} needs a docstring whose first line is how a row is made")
        if not getattr(cls, "separates", ""):
            raise ValueError(f"task {name!r} needs `separates`: what it should tell apart")
        cls.name = name
        _tasks[name] = cls
        return cls

    return add


def names() -> tuple[str, ...]:
    """Every registered task, in the order of registration, which is the order of the docs."""
    return tuple(_tasks)


def get(name: str) -> type[Task]:
    """The class registered as `name`; an unknown name is an error that lists the known ones."""
    if name not in _tasks:
        near = difflib.get_close_matches(name, _tasks, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown task {name!r}: {hint}choose from {', '.join(_tasks)}")
    return _tasks[name]


def build(spec: Spec) -> Task:
    """`build("khop:hops=3")` is `KHop(hops=3)`, with its knobs checked."""
    name, knobs = parse(spec)
    cls = get(name)
    check_options(cls, knobs)
    return cls(**knobs)
