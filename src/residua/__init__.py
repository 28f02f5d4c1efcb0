"""Residual-stream designs for Transformers behind one contract."""

import importlib
from typing import TYPE_CHECKING, Any

from residua._arrival import when_imported as _when_imported
from residua._version import __version__ as __version__
from residua.plan import Plan as Plan
from residua.plan import Site as Site

if TYPE_CHECKING:
    from residua import ops as ops
    from residua import streams as streams
    from residua.registry import build as build
    from residua.registry import design as design
    from residua.registry import names as names
    from residua.registry import register as register
    from residua.registry import unregister as unregister
    from residua.stream import Read as Read
    from residua.stream import Routing as Routing
    from residua.stream import Stream as Stream

# AutoConfig and its like then know converted models, whichever of the two packages is imported first.
_when_imported("transformers.models.auto.configuration_auto", "residua.hf.registration:register")
# And peft knows what to adapt in them, and may load their classes.
_when_imported("peft.utils.constants", "residua.hf.registration:adapt")
_when_imported("peft.auto", "residua.hf.registration:allow")

_ROOMS = ("ops", "streams")
"""Packages that need no import of their own: `residua.ops`."""
_DOORS = {
    **dict.fromkeys(("build", "design", "names", "register", "unregister"), "residua.registry"),
    **dict.fromkeys(("Read", "Routing", "Stream"), "residua.stream"),
    "Cache": "residua.model",
    "ModelConfig": "residua.model",
    "Transformer": "residua.model",
    "generate": "residua.model",
    "token_loss": "residua.model",
    "convert": "residua.hf.convert",
    "open_released": "residua.hf.released",
    "TrainConfig": "residua.lab.train",
    "load_model": "residua.lab.train",
    "train": "residua.lab.train",
    "ComparePlan": "residua.lab.compare",
    "compare": "residua.lab.compare",
    "record_routing": "residua.lab.diagnose",
    "ablate_sources": "residua.lab.diagnose",
}
"""What is found when it is first asked for, and where: `import residua` brings not even torch, so that a command that
only prints its help answers at once."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_DOORS[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(globals().keys() | _DOORS.keys() | set(_ROOMS))
