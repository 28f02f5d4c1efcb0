"""`metrics.jsonl`: one JSON object a line. All that depends on the clock or the machine's load is under `time`.

A killed and resumed run leaves the file of an undisturbed one: on resume, lines after the checkpoint are cut off and
written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from residua.lab.common.files import Record, Values, room_for


class MetricsFile:
    """Appends lines; `cut` first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self, step: int) -> None:
        """Keep the lines up to `step` and drop the rest, with a line that a kill left unfinished."""
        kept = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n") or _step(line) > step:
                        break
                    kept += len(line)
        with self.path.open("ab") as file:
            file.truncate(kept)
            os.fsync(file.fileno())

    def append(self, line: Record) -> None:
        """Write one line, at once."""
        with room_for(str(self.path)), self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Make the lines so far last: a checkpoint must not be newer than the lines it stands for."""
        with room_for(str(self.path)), self.path.open("ab") as file:
            os.fsync(file.fileno())


def read_metrics(path: Path) -> Iterator[Values]:
    """The lines of a `metrics.jsonl`; an unfinished last one is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                yield found


def _step(line: bytes) -> float:
    """The step of a line; one that is not JSON comes after everything."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
