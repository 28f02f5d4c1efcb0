"""rate(step) = lr * factor(step): a rise, then a cosine, or a plateau and a fall. Pure: resume needs no state."""

from __future__ import annotations

import math

from residua.lab.train.recipe import Recipe


def factor(config: Recipe, step: int) -> float:
    """The share of the learning rate that update `step` (0, 1, ...) uses.

    The rise ends at 1 in the update after `warmup_share` of the steps, and the last update uses `min_lr_share`:
    no update has the rate 0 unless `min_lr_share` says so.
    """
    rise = round(config.warmup_share * config.steps)
    if step < rise:
        return (step + 1) / (rise + 1)
    low = config.min_lr_share
    if config.schedule == "cosine":
        done = _progress(step, rise, config.steps)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    fall = config.steps - round(config.decline * config.steps)
    return 1.0 - (1 - low) * _progress(step, max(rise, fall - 1), config.steps)


def _progress(step: int, first: int, steps: int) -> float:
    """0 at and before step `first`, 1 at the last step."""
    return max(0, step - first) / max(1, steps - 1 - first)
