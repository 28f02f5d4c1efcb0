"""when_imported("other.module", "residua.hf.registration:register"): a call that waits for another package.

`import residua` must not import what it works with. If the module is there already, the function is called at once; if
not, a finder on `sys.meta_path` waits for it, calls the function when it has run, and is gone. The function is given by
its name, so that whoever asks need not import it either.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(watched: str, then: str) -> None:
    """Call `then`, written `module:function`, with the module called `watched`: now, or when somebody imports it."""
    if watched in sys.modules:
        _call(then, sys.modules[watched])
    else:
        sys.meta_path.insert(0, Arrival(watched, then))


class Arrival(MetaPathFinder):
    """Finds nothing itself; adds one call after the watched module has run."""

    def __init__(self, watched: str, then: str) -> None:
        self.watched, self.then, self.searching = watched, then, False

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.watched or self.searching:
            return None
        self.searching = True  # the others are asked, and this one would be asked again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _call(self.then, module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def _call(then: str, module: ModuleType) -> None:
    home, _, function = then.partition(":")
    getattr(importlib.import_module(home), function)(module)
