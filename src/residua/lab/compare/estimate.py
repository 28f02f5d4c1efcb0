"""estimate(plan): what a comparison takes, before it is begun: runs, tokens, and processor hours.

hours of a row = runs * (steps * seconds of an update + validations * seconds of one) / 3600

The seconds are measured here and now, over a few updates of every row on random tokens: processor seconds of one
process, so that a machine that is busy with other things gives nearly the same. Looks that add seeds are not foreseen:
the estimate is of the plan's own seeds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from residua.lab.common.files import Record, Values
from residua.lab.compare.plan import ComparePlan
from residua.lab.data.tokenizer import Bytes, bpe_size
from residua.lab.train.loop import Trainer
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import reproducible
from residua.lab.train.sampler import Tokens
from residua.lab.train.subject import Subject

WARM, TIMED = 1, 3
"""Updates before the clock starts, and those that are timed."""


@dataclass(frozen=True)
class _Random:
    """Tokens that mean nothing, as many as a few updates need."""

    train: np.ndarray
    valid: np.ndarray
    vocab: int
    mask: int
    valid_bytes: int
    manifest: Record


def estimate(plan: ComparePlan, tell: Callable[[str], None] = lambda text: None) -> list[Values]:
    """For every row its runs of each kind, their steps and tokens, and the processor hours of them all."""
    rates = {variant.label: {"lr": 1e-3} for variant in plan.variants()}
    kinds = {"tuning": plan.tuning(), "checking": plan.checking(rates), "reported": plan.runs({})}
    counted = {kind: Counter(run.variant.label for run in runs) for kind, runs in kinds.items()}
    rows = []
    for variant in plan.variants():
        tell(f"timing {variant.label}")
        config = plan.config(variant, plan.seeds[0])
        runs = {kind: count[variant.label] for kind, count in counted.items()}
        update, validation = seconds(config)
        each = config.steps * update + (1 + math.ceil(config.steps / config.eval_every)) * validation
        rows.append(
            {
                "label": variant.label,
                "runs": runs,
                "steps": config.steps,
                "tokens": config.steps * config.tokens_per_step,
                "seconds_per_run": each,
                "hours": sum(runs.values()) * each / 3600,
            }
        )
    return rows


def seconds(
    config: Recipe, subject: Callable[[Tokens], Subject] | None = None, vocab: int | None = None
) -> tuple[float, float]:
    """Processor seconds of an update and of a validation of a config, here and now.

    subject: makes what is trained, where it is no model of our own. vocab: its ids, where the tokenizer does not tell.
    """
    with reproducible(config):
        trainer = on_random_tokens(config, WARM + TIMED, subject, vocab)
        times = []
        for _ in range(WARM + TIMED):
            begun = time.process_time()
            trainer.update()
            times.append(time.process_time() - begun)
        begun = time.process_time()
        trainer.validate()
        return median(times[WARM:]), time.process_time() - begun


def on_random_tokens(
    config: Recipe, steps: int, subject: Callable[[Tokens], Subject] | None = None, vocab: int | None = None
) -> Trainer:
    """What trains by a config, on tokens that mean nothing and for so many updates: for timing alone."""
    vocab = _vocab(config.tokenizer) if vocab is None else vocab
    draw = np.random.default_rng(0)
    train, valid = (draw.integers(0, vocab, size) for size in (64 * config.context, 96 * config.context))
    tokens = _Random(train, valid, vocab, vocab - 1, len(valid), {"fingerprint": "none"})
    config = replace(config, steps=steps, explode=1e30, corpus="pydoc")
    return Trainer(config, tokens, None if subject is None else subject(tokens))


def _vocab(tokenizer: str) -> int:
    if tokenizer.startswith("bpe:"):
        return bpe_size(tokenizer)
    if tokenizer == Bytes.name:
        return Bytes.vocab
    raise ValueError(f"--timed knows the vocabulary of bytes and bpe:VOCAB, not of {tokenizer}; drop it")
