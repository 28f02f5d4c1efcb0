"""One run as a pool gets it: a config in a file, a folder, and two files beside the config that say how it went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from residua.lab.common.expect import read_expected
from residua.lab.common.files import write_json
from residua.lab.train.recipe import Recipe

DONE, FAILED, STOPPED = 0, 1, 130
"""How a run may end, as the exit code of its process: by itself, by an error, because somebody asked it to."""


class Planned(Protocol):
    """A run of an experiment: what decides it, and where it goes below the experiment's directory."""

    @property
    def config(self) -> Recipe: ...
    @property
    def folder(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Work:
    """A run to be made. Its folder is the run's alone; the files of the comparison lie beside the config."""

    job: Path
    """The run's `TrainConfig` or `FinetuneConfig` as JSON."""
    folder: Path
    threads: int = 1
    gpus: int = 0
    """What it needs of a machine."""

    @property
    def log(self) -> Path:
        """What its process printed."""
        return self.job.with_suffix(".log")

    @property
    def ending(self) -> Path:
        """How its process ended; not there of one that runs or was killed."""
        return self.job.with_suffix(".end.json")

    def begin(self) -> int:
        """Forget how an earlier process ended; the bytes of the log that are not the next one's."""
        self.ending.unlink(missing_ok=True)
        return self.log.stat().st_size if self.log.is_file() else 0

    def end(self, code: int, message: str) -> None:
        """Write down how the process ends."""
        write_json(self.ending, {"code": code, "message": message})

    def ended(self) -> tuple[int, str] | None:
        """How its process ended; None if it was killed."""
        if not self.ending.is_file():
            return None
        told = read_expected(self.ending, {"code": int, "message": str})
        return told["code"], told["message"]
