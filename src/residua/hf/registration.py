"""Auto classes that know converted models once `import residua` was said, before or after `import transformers`.

`import residua` must not import transformers. If it is there already, its Auto classes are told at once; if not, a
finder on `sys.meta_path` waits for the module that holds AutoConfig, tells it when it has run, and is gone.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from residua.hf.anatomy import ANATOMY, PREFIX

WATCHED = "transformers.models.auto.configuration_auto"


def register_when_imported() -> None:
    """Tell transformers of the converted model types, now or when it arrives."""
    if WATCHED in sys.modules:
        _register(sys.modules[WATCHED])
    elif not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival())


class _Arrival(MetaPathFinder):
    """Finds nothing itself; adds one call after the watched module has run."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(auto: ModuleType) -> None:
    for base_type in ANATOMY:
        auto.CONFIG_MAPPING.register(PREFIX + base_type, _pending(base_type), exist_ok=True)


def _pending(base_type: str) -> type:
    """A stand-in for a config class that imports the base's only when one is made."""

    class Pending:
        model_type = PREFIX + base_type

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return _made()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return _made().from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return _made().from_pretrained(*args, **kwargs)

    def _made() -> Any:
        from residua.hf.classes import config_class

        return config_class(base_type)

    return Pending
