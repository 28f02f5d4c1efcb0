"""The sizes of a plan: the shape of a model, and how long it trains.

steps = tokens_per_parameter * parameters of the baseline at this size, embedding and head left out / tokens a step

All rows of a size train on the same tokens, so that a row with more parameters gets no more text for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from residua.lab.compare.match import VOCAB
from residua.lab.train import TrainConfig
from residua.model import ModelConfig, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a model."""

    width: int = 128
    depth: int = 6
    heads: int = 4
    kv_heads: int | None = None
    tokens_per_parameter: float | None = None
    """How many tokens it trains on for each parameter of the baseline; None: the steps of `[train]`."""
    seeds: int | None = None
    """How many of the plan's seeds its rows have, from the first; None: all."""
    designs: tuple[str, ...] = ()
    """Which of the plan's designs are trained at this size; empty: all."""
    lr: tuple[float, ...] = ()
    """The rates that its rows choose from, in place of those of `[tune]`."""

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}"

    def check(self) -> None:
        """Refuse what is no size."""
        for name in ("width", "depth", "heads", "kv_heads", "seeds"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and value is not None:
                raise ValueError(f"sizes: {name} is a whole number from 1 on, not {value!r}")
        budget = self.tokens_per_parameter
        if budget is not None and (type(budget) not in (int, float) or not 0 < budget < math.inf):
            raise ValueError(f"sizes: tokens_per_parameter is a positive number, not {budget!r}")


def counted_parameters(config: TrainConfig) -> int:
    """Parameters of a model without its embedding and head, which grow with the vocabulary alone."""
    return _counted(config.model(VOCAB))


@lru_cache(maxsize=1024)
def _counted(model: ModelConfig) -> int:
    return sizes_of(model).parameters - model.vocab * model.width * (1 if model.tied else 2)


def budget_steps(baseline: TrainConfig, tokens_per_parameter: float) -> int:
    """Updates that see so many tokens for each counted parameter of the baseline, rounded up."""
    return max(1, math.ceil(tokens_per_parameter * counted_parameters(baseline) / baseline.tokens_per_step))
