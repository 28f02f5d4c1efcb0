"""Where residua keeps what it can make again: `RESIDUA_CACHE`, or `residua` in the user's cache folder.

Users without a home folder, as in many containers, have a folder of their own among the temporary files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """The folder; it need not exist yet."""
    chosen = os.environ.get("RESIDUA_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(f"RESIDUA_CACHE={chosen}: there is no such home folder; give a path") from None
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "residua"
    try:
        return Path.home() / ".cache" / "residua"
    except RuntimeError:  # a user without a name, as in many containers
        return Path(tempfile.gettempdir()) / f"residua-{os.getuid()}"
