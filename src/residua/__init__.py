"""Residual-stream designs for Transformers behind one contract."""

from typing import Any

from residua import ops as ops
from residua import streams as streams
from residua._version import __version__ as __version__
from residua.hf.registration import register_when_imported as _register_when_imported
from residua.plan import Plan as Plan
from residua.plan import Site as Site
from residua.registry import build as build
from residua.registry import design as design
from residua.registry import names as names
from residua.registry import register as register
from residua.registry import unregister as unregister
from residua.stream import Read as Read
from residua.stream import Routing as Routing
from residua.stream import Stream as Stream

_register_when_imported()


def __getattr__(name: str) -> Any:
    """`residua.convert`, which brings transformers only when it is asked for."""
    if name == "convert":
        from residua.hf.convert import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
