"""The command that is running, as it would be typed again: what every results file carries."""

from __future__ import annotations

import shlex
import sys


def spoken() -> str:
    """`residua compare --plan ...`."""
    return "residua " + shlex.join(sys.argv[1:])
