"""Runs that are finished, on disk, so that a command that was stopped goes on: what was asked -> what came out.

One JSON file, put in place whole after every run. A run is taken up only if all that decides it is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residua.train.durable import read_json, write_json


class Kept:
    """The runs in a file; without a path, in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.runs = read_json(path)

    def get(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The run that was asked for, if it is there."""
        return self.runs.get(_key(asked))

    def put(self, asked: Mapping[str, Any], run: dict[str, Any]) -> None:
        """Keep a run from now on."""
        self.runs[_key(asked)] = run
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.runs)

    def clear(self) -> None:
        """The results are written: the runs are in there."""
        self.runs = {}
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _key(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, sort_keys=True)
