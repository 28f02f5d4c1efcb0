"""Where residua keeps what it can make again: `RESIDUA_CACHE`, or `residua` in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder; it need not exist yet."""
    chosen = os.environ.get("RESIDUA_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "residua"
