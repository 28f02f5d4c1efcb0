"""Classes that are made at run time: each is an attribute of this module, where it is found by its name."""

from __future__ import annotations

import sys
from typing import Any


def made(name: str, bases: tuple[Any, ...], body: dict[str, Any]) -> Any:
    """A class called `name`, kept here."""
    found = type(name, bases, {**body, "__module__": __name__})
    setattr(sys.modules[__name__], name, found)
    return found
