"""What comes with an extra: where it is missing, one line says which to install, before anything is done."""

from __future__ import annotations

import importlib.util


def need(extra: str, *modules: str) -> None:
    """Raise unless every module of an extra can be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this command needs {', '.join(missing)}: pip install 'residua[{extra}]'")
