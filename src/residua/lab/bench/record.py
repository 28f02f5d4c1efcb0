"""A results file: what was measured, under which regime, by which command, behind which green tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from residua.lab.bench import gate
from residua.lab.bench.timing import Measured
from residua.lab.common.files import write_json

FORMAT = 1


def write(path: Path, measured: Measured, *, command: str, regime: Measured, subjects: Iterable[str]) -> None:
    """Check the gate, then write the file whole or not at all."""
    tests = gate.check(subjects)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "command": command, "regime": regime, "tests": tests, **measured})


def read(path: Path) -> Measured:
    """A file that `write` made."""
    found = json.loads(path.read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}; this version reads {FORMAT}. Measure again")
    return found
