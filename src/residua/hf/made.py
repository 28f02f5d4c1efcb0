"""Classes that are made at run time: each is an attribute of this module, where `residua.hf.shim` finds it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from residua.hf.anatomy import Class

HOME = "residua.hf.shim"
"""Where another process looks a class up by its name, and it is made there if it has to be."""


def made(name: str, bases: tuple[Class, ...], body: Mapping[str, object]) -> Class:
    """A class called `name`, kept here."""
    found = type(name, bases, {**body, "__module__": __name__})
    found.__module__ = HOME  # only now: what is made of annotations wants a module that is there
    setattr(sys.modules[__name__], name, found)
    return found
