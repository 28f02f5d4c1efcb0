"""The contract of a task: `batch(size, generator)` gives token ids, answers aligned with them, and what else is known.

    ids      [b t], below `vocab`
    targets  [b t]: what position t must predict, `IGNORED` (-100) where nothing is asked
    extra    tensors by name that the task documents, such as the number of hops of each question

The same seed gives the same rows. The constructor keywords of a task are its knobs; a task has no other state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from residua.model.objective import IGNORED


class Batch(NamedTuple):
    """Rows of one task."""

    ids: Int[Tensor, "b t"]
    targets: Int[Tensor, "b t"]
    extra: dict[str, Tensor]


class Task(ABC):
    """A generator of questions whose answers are known exactly."""

    name: ClassVar[str]
    """Set by `register`."""
    separates: ClassVar[str]
    """What it should tell apart, in one line: a hypothesis."""

    vocab: int
    """Token ids are 0 to vocab - 1, and so are the answers."""
    length: int
    """Tokens a row."""
    answers: int
    """Different answers, all equally likely: a constant guess is right once in `answers`."""

    @property
    def chance(self) -> float:
        """The accuracy of the best constant guess, in expectation."""
        return 1 / self.answers

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """`size` rows drawn from the generator, on its device."""
        if size < 1:
            raise ValueError(f"{self.name}: a batch needs at least 1 row, not {size}")
        return self.draw(size, generator)

    @abstractmethod
    def draw(self, size: int, generator: torch.Generator) -> Batch:
        """The rows; `size` is at least 1."""


def at_least(task: str, low: int, **knobs: int) -> None:
    """Refuse a knob below `low`, by name."""
    for name, value in knobs.items():
        if value < low:
            raise ValueError(f"{task}: {name} must be at least {low}, not {value}")


def at_most(task: str, high: int, why: str, **knobs: int) -> None:
    """Refuse a knob above `high`, by name and with the reason."""
    for name, value in knobs.items():
        if value > high:
            raise ValueError(f"{task}: {name}={value} is more than {high}, {why}")


def need_prime(task: str, modulus: int) -> None:
    """Refuse a modulus in which some multiplication has no inverse, or in which there is none but by 1."""
    if modulus < 3 or any(modulus % factor == 0 for factor in range(2, int(modulus**0.5) + 1)):
        raise ValueError(f"{task}: modulus must be a prime of at least 3, so that every step can be undone; {modulus}")


def integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "..."]:
    """Uniform in 0 to high - 1."""
    return torch.randint(high, shape, generator=generator, device=generator.device)


def distinct(high: int, rows: int, count: int, generator: torch.Generator) -> Int[Tensor, "rows count"]:
    """`count` different integers below `high` for each row, in random order."""
    return torch.rand(rows, high, generator=generator, device=generator.device).argsort(dim=1, stable=True)[:, :count]


def unasked(ids: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Targets that ask nothing yet."""
    return torch.full_like(ids, IGNORED)


def only_last(targets: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The same targets, asked for at the last position alone."""
    asked = unasked(targets)
    asked[:, -1] = targets[:, -1]
    return asked


def accuracy(logits: Float[Tensor, "b t vocab"], targets: Int[Tensor, "b t"]) -> float:
    """Right answers over questions; a position whose target is -100 is no question, and of equal logits the first
    counts."""
    asked = targets != IGNORED
    if not asked.any():
        raise ValueError("no position is scored: every target is -100")
    return (logits.argmax(-1) == targets)[asked].double().mean().item()
