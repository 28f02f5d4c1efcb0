"""Residual-stream designs for Transformers behind one contract."""

from residua import ops as ops
from residua import streams as streams
from residua._version import __version__ as __version__
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
