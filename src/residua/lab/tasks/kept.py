"""Runs that are finished, on disk, so that a command that was stopped goes on: what was asked -> what came out.

A folder with one JSON file, put in place whole after every run, and the lock of the process at work. A run is taken up
only if all that decides it is the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from residua.lab.common.files import Record, Values, read_json, write_json
from residua.lab.common.locks import locked


class Kept:
    """Finished runs; in memory alone, unless `kept_in` a folder."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.runs: dict[str, Values] = read_json(file) if file is not None and file.exists() else {}

    def get(self, asked: Record) -> Values | None:
        """The run that was asked for, if it is there."""
        return self.runs.get(_key(asked))

    def put(self, asked: Record, run: Values) -> None:
        """Keep a run from now on."""
        self.runs[_key(asked)] = run
        if self.file is not None:
            write_json(self.file, self.runs)


@contextmanager
def kept_in(folder: Path | None) -> Iterator[Kept]:
    """The runs in a folder, for one process at a time; it goes when the block ends well, and stays otherwise."""
    if folder is None:
        yield Kept()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        yield Kept(folder / "runs.json")
        shutil.rmtree(folder, ignore_errors=True)  # a system that keeps an open lock keeps the folder, empty of runs


def _key(asked: Record) -> str:
    return json.dumps(asked, sort_keys=True)
