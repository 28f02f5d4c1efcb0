"""What is being trained, as the loop sees it: a model of our own, or a checkpoint that was converted.

The loop knows batches, rates, checkpoints and signals. What depends on the kind of model is here: how it is built and
called, which optimizer group a parameter is in, what a validation looks at, and how to say where it broke.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from residua.lab.common.files import Values
from residua.lab.train.config import TrainConfig
from residua.lab.train.diverge import Diverged, explain_gradient, explain_loss
from residua.lab.train.optim import group_of
from residua.lab.train.precision import execution
from residua.lab.train.sampler import Batch
from residua.lab.train.walk import stream_rms
from residua.model import Transformer


class Subject(ABC):
    """A model with everything about it that the loop needs."""

    model: nn.Module
    design: str
    """Its residual design, as a spec string."""
    fused: bool = True
    """Whether AdamW is torch's fused one: faster, and not to the last bit the plain one."""

    @abstractmethod
    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        """One forward pass of `forward`, which is the model or its compiled twin."""

    @abstractmethod
    def groups(self) -> Mapping[str, str]:
        """The optimizer group of every parameter that learns, by its name."""

    @abstractmethod
    def describe(self) -> Values:
        """What a checkpoint must say to build the model again."""

    def look(self, batch: Batch, logits: Tensor) -> Values:
        """More to report with a validation, from its first batch and the logits there."""
        return {}

    @abstractmethod
    def explain_loss(self, step: int, loss: float, batches: list[Batch]) -> Diverged:
        """Why a loss is not finite."""

    def explain_gradient(self, step: int, norm: float, limit: float) -> Diverged:
        """Which gradient is not finite or exploded."""
        return explain_gradient(self.model, step, norm, limit)

    def finish(self, folder: Path) -> None:  # noqa: B027 (most subjects have nothing to add)
        """Called once, when the last update is made: what the run leaves beside its checkpoints."""


class OwnModel(Subject):
    """A `Transformer` of our own, built from its config and seed."""

    model: Transformer

    def __init__(self, config: TrainConfig, vocab: int, device: torch.device) -> None:
        self.config, self.design = config, config.design
        self.model = Transformer(config.model(vocab), seed=config.seed).to(device)
        self.model.execution = execution(config)

    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        return forward(ids, checkpointed=self.config.checkpointed and self.model.training)

    def groups(self) -> Mapping[str, str]:
        return group_of(self.model)

    def describe(self) -> Values:
        return self.model.config.to_json()

    def look(self, batch: Batch, logits: Tensor) -> Values:
        return {"stream_rms": stream_rms(self.model, batch.inputs)} if self.config.stream_rms else {}

    def explain_loss(self, step: int, loss: float, batches: list[Batch]) -> Diverged:
        return explain_loss(self.model, step, loss, batches)
