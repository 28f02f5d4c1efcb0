"""summarise(lines): what the updates of a run come to: the batches they saw, their largest gradient, their spikes.

A spike is an update whose loss is more than `DEVIATIONS` standard deviations above the mean of the `WINDOW` losses
before it, where there are that many; updates in a row are one spike. It is the spike score of OLMo 2 (arXiv 2501.00656)
with a window that a short run has, and losses that fall are none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from residua.lab.common.files import Record, Values, json_digest

WINDOW = 128
DEVIATIONS = 7.0


def summarise(lines: Sequence[Record]) -> Values:
    """From the lines of the updates in metrics.jsonl; None for what no line holds."""
    losses = [line["loss"] for line in lines if "loss" in line]
    norms = [(line["gradient_norm"], line["step"]) for line in lines if "gradient_norm" in line]
    largest, step = max(norms, default=(None, None))
    return {
        "lines": len(lines),
        "batches": json_digest([line.get("batch", "") for line in lines]),
        "gradient_norm": largest,
        "gradient_step": step,
        "spikes": len(spikes(losses)),
    }


def spikes(losses: Sequence[float], window: int = WINDOW, deviations: float = DEVIATIONS) -> list[int]:
    """The places in `losses` at which a spike begins."""
    values = np.asarray(losses, dtype=np.float64)
    if len(values) <= window:
        return []
    before = np.lib.stride_tricks.sliding_window_view(values, window)[:-1]
    high = values[window:] > before.mean(1) + deviations * before.std(1, ddof=1)
    begins = high & ~np.concatenate([[False], high[:-1]])
    return (np.flatnonzero(begins) + window).tolist()
