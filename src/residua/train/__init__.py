"""Training: one recipe for every design, and a run that a kill, a full disk or a power cut cannot lose."""

from residua.train.checkpoint import CheckpointError as CheckpointError
from residua.train.config import TrainConfig as TrainConfig
from residua.train.diverge import Diverged as Diverged
from residua.train.durable import DiskFull as DiskFull
from residua.train.interrupt import Interrupted as Interrupted
from residua.train.lock import RunLocked as RunLocked
from residua.train.loop import Trainer as Trainer
from residua.train.metrics import read_metrics as read_metrics
from residua.train.run import Result as Result
from residua.train.run import load_model as load_model
from residua.train.run import train as train
