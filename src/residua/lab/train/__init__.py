"""Training: one recipe for every design, and a run that a kill, a full disk or a power cut cannot lose."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua.lab.common.files import DiskFull as DiskFull
    from residua.lab.common.locks import RunLocked as RunLocked
    from residua.lab.train.checkpoint import CheckpointError as CheckpointError
    from residua.lab.train.config import TrainConfig as TrainConfig
    from residua.lab.train.diverge import Diverged as Diverged
    from residua.lab.train.interrupt import Interrupted as Interrupted
    from residua.lab.train.loop import Trainer as Trainer
    from residua.lab.train.metrics import read_metrics as read_metrics
    from residua.lab.train.ranks import RankFailed as RankFailed
    from residua.lab.train.result import Result as Result
    from residua.lab.train.run import load_model as load_model
    from residua.lab.train.run import train as train

_DOORS = {
    "DiskFull": "residua.lab.common.files",
    "RunLocked": "residua.lab.common.locks",
    "CheckpointError": "residua.lab.train.checkpoint",
    "TrainConfig": "residua.lab.train.config",
    "Diverged": "residua.lab.train.diverge",
    "Interrupted": "residua.lab.train.interrupt",
    "Trainer": "residua.lab.train.loop",
    "read_metrics": "residua.lab.train.metrics",
    "RankFailed": "residua.lab.train.ranks",
    "Result": "residua.lab.train.result",
    "load_model": "residua.lab.train.run",
    "train": "residua.lab.train.run",
}
"""What is found when it is first asked for, and where: flags are made from a recipe before torch is needed."""


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_DOORS[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(globals().keys() | _DOORS.keys())
