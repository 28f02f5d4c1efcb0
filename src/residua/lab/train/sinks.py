"""Where else metrics can go: TensorBoard, trackio, W&B. `metrics.jsonl` is written whether they are there or not.

A sink opens when the run says that it starts or resumes, and then takes every training and validation line. What is
missing is said before anything is written.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from residua.lab.common.files import Record, Values
from residua.lab.train.recipe import Recipe


class Sink(ABC):
    """Takes the events of one run."""

    package: ClassVar[str]
    """What must be importable."""

    def __init__(self, folder: Path, config: Recipe) -> None:
        self.folder, self.config, self.opened = folder, config, False
        try:
            self.module: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(f"{self.package} is not usable ({error}); pip install 'residua[track]'") from None

    def take(self, event: Record) -> None:
        """Open at the start; pass numbers on."""
        if event["kind"] in ("start", "resumed"):
            self.open(event["step"])
            self.opened = True
        elif event["kind"] in ("train", "valid"):
            self.log(event["step"], scalars(event))

    @abstractmethod
    def open(self, step: int) -> None:
        """Begin, or go on after `step`."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""

    @abstractmethod
    def close(self) -> None:
        """Everything is written."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.opened:
            self.close()


class TensorBoard(Sink):
    """Event files in `tensorboard/` of the run directory."""

    package = "torch.utils.tensorboard"

    def open(self, step: int) -> None:
        # lines after the checkpoint come again: the old ones are to be forgotten
        self.writer = self.module.SummaryWriter(self.folder / "tensorboard", purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Trackio(Sink):
    """A run of project `residua` in trackio's local store, named after the run directory."""

    package = "trackio"

    def open(self, step: int) -> None:
        with redirect_stdout(sys.stderr):  # it greets there, where a result in JSON is to stand alone
            self.module.init(
                project="residua", name=self.folder.name, config=self.config.to_json(), resume="allow", **self.options()
            )

    def options(self) -> Values:
        """What else `init` is told."""
        return {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.module.finish()


class WandB(Trackio):
    """A run of project `residua`; offline, unless WANDB_MODE says otherwise: training asks nobody to log in."""

    package = "wandb"

    def options(self) -> Values:
        mode = os.environ.get("WANDB_MODE", "offline")
        return {"id": f"{self.folder.name}-{self.config.digest}", "dir": str(self.folder), "mode": mode}


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}


def make_sinks(names: Sequence[str], folder: Path, config: Recipe) -> list[Sink]:
    """The sinks of these names, not yet open."""
    for name in names:
        if name not in SINKS:
            raise ValueError(f"unknown sink {name!r}; choose from {', '.join(SINKS)}")
    return [SINKS[name](folder, config) for name in dict.fromkeys(names)]


def scalars(event: Record) -> dict[str, float]:
    """The numbers of a line as `kind/name`, those inside `time` and `stream_rms` with their own prefix."""
    kind = event["kind"]
    found: dict[str, float] = {}
    for key, value in event.items():
        if isinstance(value, Mapping):
            found |= {f"{kind}/{key}/{inner}": number for inner, number in value.items()}
        elif isinstance(value, int | float) and key != "step":
            found[f"{kind}/{key}"] = value
    return found
