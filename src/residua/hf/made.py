"""Classes that are made at run time: each is an attribute of this module, where it is found by its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from residua.hf.anatomy import Class


def made(name: str, bases: tuple[Class, ...], body: Mapping[str, object]) -> Class:
    """A class called `name`, kept here."""
    found = type(name, bases, {**body, "__module__": __name__})
    setattr(sys.modules[__name__], name, found)
    return found
