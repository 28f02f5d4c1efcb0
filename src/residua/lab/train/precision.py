"""In which types a run computes: autocast around forward passes, and the type of the stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from residua.lab.train.config import TrainConfig
from residua.lab.train.recipe import Recipe
from residua.runner import Execution


def autocast(config: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """The context of every forward pass: with dtype=bfloat16, sublayers compute in it."""
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def execution(config: TrainConfig) -> Execution:
    """How the stream runs: its state in the type the config names, from `open` to the head.

    Under autocast alone it would be whatever the sums promote to: float32 in one design, bfloat16 in another, both in
    a third. Here the state between sites is one type, by construction: bfloat16, or float32 with `fp32_stream`, which
    also keeps the design's own reads and writes out of autocast.
    """
    if config.dtype == "float32":
        return Execution()
    return Execution(torch.float32 if config.fp32_stream else torch.bfloat16, autocast=not config.fp32_stream)
