"""check_fits(config): what a run must hold at least, before anything is read, built or written.

    bytes >= 16 P + r (4 v + 4 d s)        P parameters with gradients and two moments, r positions of a forward pass,
                                           v ids with a logit each, d the width, s the sublayers whose inputs are kept

A bound from below: a run that it lets through may still be too large, but one that it refuses could not have run.
"""

from __future__ import annotations

from residua.lab.train.config import TrainConfig
from residua.lab.train.reproducible import device_of, memory_of


def least_bytes(config: TrainConfig, vocab: int = 2) -> dict[str, int]:
    """What the parameters, the logits and the kept inputs of sublayers take at least."""
    model, rows = config.model(vocab), config.batch * config.context
    kept = config.depth if config.checkpointed else config.depth * len(model.slots)
    narrow = 2 if config.dtype == "bfloat16" else 4
    return {
        "parameters": 16 * model.least_parameters,
        "logits": 4 * rows * vocab,
        "activations": narrow * rows * config.width * kept,
    }


def least_vocab(tokenizer: str) -> int:
    """Ids that a tokenizer has at least, by its name alone."""
    size = tokenizer.removeprefix("bpe:")
    return int(size) if tokenizer.startswith("bpe:") and size.isdecimal() else 258 if tokenizer == "bytes" else 2


def check_fits(config: TrainConfig) -> None:
    """Refuse a run on one process that its device cannot hold, with the figure."""
    device = device_of(config)
    parts, there = least_bytes(config, least_vocab(config.tokenizer)), memory_of(device, 1)
    if (needed := sum(parts.values())) > there:
        told = ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in parts.items())
        raise ValueError(
            f"this run needs at least {needed / 2**30:,.1f} GiB ({told}) and {device.type} has {there / 2**30:,.1f}: "
            "lower batch, context, width or depth"
        )
