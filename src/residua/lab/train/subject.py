"""What is being trained, as the loop sees it: a model of our own, or a checkpoint that was converted.

The loop knows batches, rates, checkpoints and signals. What depends on the kind of model is here: how it is built and
called, which optimizer group a parameter is in, what a validation looks at, and how to say where it broke.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from residua.lab.common.files import Values
from residua.lab.train.config import TrainConfig
from residua.lab.train.diverge import Diverged, Seen, explain_gradient, explain_loss, watch
from residua.lab.train.optim import GROUPS, group_of
from residua.lab.train.placement import Placement, place
from residua.lab.train.precision import autocast as autocast
from residua.lab.train.precision import execution as execution
from residua.lab.train.ranks import ALONE, Ranks
from residua.lab.train.recipe import Recipe
from residua.lab.train.sampler import Batch
from residua.model import Transformer, token_loss


class Subject(ABC):
    """A model with everything about it that the loop needs."""

    model: nn.Module
    design: str
    """Its residual design, as a spec string."""
    ranks: Ranks = ALONE
    """Those that hold the model."""
    fused: bool = True
    """Whether AdamW is torch's fused one: faster, and not to the last bit the plain one."""

    @abstractmethod
    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        """One forward pass of `forward`, which is the model or its compiled twin."""

    def loss(self, batch: Batch, forward: nn.Module) -> Tensor:
        """The mean loss of one forward pass, to differentiate."""
        return token_loss(self.logits(batch.inputs, forward), batch.targets)

    @abstractmethod
    def groups(self) -> Mapping[str, str]:
        """The optimizer group of every parameter that learns, by its name."""

    def place(self, config: Recipe) -> Placement:
        """How the loop runs the model on its ranks."""
        return Placement(config, self.model, self.ranks)

    def sizes(self) -> dict[str, int]:
        """Parameters of the whole model in each optimizer group."""
        return sizes_of(self.model, self.groups())

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
        return explain_gradient(self.model, step, norm, limit, self.ranks)

    def finish(self, folder: Path) -> None:  # noqa: B027 (most subjects have nothing to add)
        """Called once, when the last update is made: what the run leaves beside its checkpoints."""


class OwnModel(Subject):
    """A `Transformer` of our own, built from its config and seed."""

    model: Transformer

    def __init__(self, config: TrainConfig, vocab: int, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.config, self.design, self.ranks = config, config.design, ranks
        self.model = place(config.model(vocab), config.seed, execution(config), ranks, device)

    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        return forward(ids, checkpointed=self.config.checkpointed and self.model.training)

    def loss(self, batch: Batch, forward: nn.Module) -> Tensor:
        checkpointed = self.config.checkpointed and self.model.training
        return forward(batch.inputs, targets=batch.targets, checkpointed=checkpointed)

    def groups(self) -> Mapping[str, str]:
        return group_of(self.model)

    def describe(self) -> Values:
        return self.model.config.to_json()

    def look(self, batch: Batch, logits: Tensor) -> Values:
        if not self.config.stream_rms:
            return {}
        rows = len(batch.inputs) if batch.counted else 0  # a rank without rows of its own runs along
        return {"stream_rms": stream_rms(self.model, batch.inputs, self.ranks, rows)}

    def explain_loss(self, step: int, loss: float, batches: list[Batch]) -> Diverged:
        return explain_loss(self.model, step, loss, batches, self.ranks)


def sizes_of(model: nn.Module, belongs: Mapping[str, str]) -> dict[str, int]:
    """Parameters that learn in each optimizer group."""
    found = dict.fromkeys(GROUPS, 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[belongs[name]] += parameter.numel()
    return found


def stream_rms(model: Transformer, ids: Int[Tensor, "b t"], ranks: Ranks = ALONE, rows: int = 1) -> dict[str, float]:
    """RMS of what every site reads, before its norm, in reading order; of the first lane where there are several.

    rows: how much this rank's share weighs among those of all ranks.
    """
    found: dict[str, Tensor] = {}

    def look(seen: Seen) -> None:
        if seen.what == "read" and seen.site not in found:
            found[seen.site] = seen.tensor.float().square().mean()

    watch(model, ids, look)
    if ranks.alone:
        return {site: square.sqrt().item() for site, square in found.items()}
    every = torch.tensor(ranks.say([rows, *map(float, found.values())]), dtype=torch.float64)
    weights = every[:, :1]
    squares = (weights * every[:, 1:]).sum(0) / weights.sum()
    return dict(zip(found, squares.sqrt().tolist(), strict=True))
