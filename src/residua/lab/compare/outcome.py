"""How a run of a comparison ended: with a result, or broken by its own numbers. Its folder says which.

result.json, routing.json   it finished, and its routing was looked at
diverged.json               it broke: step, site and message; the same run would break again, so it is not run again
"""

from __future__ import annotations

import math
from pathlib import Path

from residua.lab.common.files import Record, read_json, write_json
from residua.lab.runs import ROUTING
from residua.lab.train import Diverged

RESULT, DIVERGED = "result.json", "diverged.json"


def is_done(folder: Path) -> bool:
    """Whether a run has its result and its routing."""
    return (folder / RESULT).exists() and (folder / ROUTING).exists()


def divergence(folder: Path) -> Record | None:
    """Where and why a run broke: its `step`, `site` and `message`."""
    return read_json(folder / DIVERGED) if (folder / DIVERGED).exists() else None


def write_divergence(folder: Path, broken: Diverged) -> None:
    """Leave word that a run broke."""
    write_json(folder / DIVERGED, {"step": broken.step, "site": broken.site, "message": str(broken)})


def final_loss(folder: Path) -> float:
    """The validation loss of a run that ended; infinite if it diverged."""
    return math.inf if divergence(folder) else read_json(folder / RESULT)["loss"]
