"""Training: one recipe for every design, and a run that a kill, a full disk or a power cut cannot lose."""

from residua.lab.common.files import DiskFull as DiskFull
from residua.lab.common.locks import RunLocked as RunLocked
from residua.lab.train.checkpoint import CheckpointError as CheckpointError
from residua.lab.train.config import TrainConfig as TrainConfig
from residua.lab.train.diverge import Diverged as Diverged
from residua.lab.train.interrupt import Interrupted as Interrupted
from residua.lab.train.loop import Trainer as Trainer
from residua.lab.train.metrics import read_metrics as read_metrics
from residua.lab.train.ranks import RankFailed as RankFailed
from residua.lab.train.run import Result as Result
from residua.lab.train.run import load_model as load_model
from residua.lab.train.run import train as train
