"""Exact accuracy: the part of the questions whose most likely answer is the right one."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from residua.lab.tasks.task import IGNORED


def accuracy(logits: Float[Tensor, "b t vocab"], targets: Int[Tensor, "b t"]) -> float:
    """Right answers over questions; a position whose target is -100 is no question, and of equal logits the first
    counts."""
    asked = targets != IGNORED
    if not asked.any():
        raise ValueError("no position is scored: every target is -100")
    return (logits.argmax(-1) == targets)[asked].double().mean().item()
