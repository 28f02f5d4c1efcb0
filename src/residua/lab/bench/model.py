"""A whole training step of each design over that of `standard`, and what its reads and writes alone would add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from residua.lab.bench import stack
from residua.lab.bench.device import current
from residua.lab.bench.served import served
from residua.lab.bench.timing import STANDARD, Form, Measured, interleave, interleave_until
from residua.model import ModelConfig, Transformer

RESOLUTION = 0.01
"""A step is called resolved while `standard` against itself stays within this."""

GROUP = 6
"""Designs of one interleaved run, with a `standard` and a control of their own: a round of more would take so long that
the machine changes within it."""


def step(design: str, depth: int, width: int, rows: int, tokens: int, **settings: Any) -> Form:
    """Forward and backward of a language model's loss, no optimizer."""
    config = ModelConfig(vocab=1024, width=width, depth=depth, heads=max(1, width // 64), design=design, **settings)
    model = Transformer(config).to(current())
    ids = torch.randint(config.vocab, (rows, tokens + 1), generator=torch.Generator().manual_seed(0)).to(current())

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids[:, :-1], targets=ids[:, 1:]).backward()

    return run


def measure(
    designs: Sequence[str],
    *,
    depth: int,
    width: int,
    rows: int,
    tokens: int,
    seconds: float,
    pairs: int,
    attempts: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Step time over that of `standard`: every design interleaved with it, at least `pairs` rounds an attempt.

    A group whose control is not within RESOLUTION gets as many rounds again, up to `attempts` times; all rounds count.
    """
    ratios: Measured = {}
    controls, whole = [], []
    for start in range(0, len(designs), GROUP):
        group = designs[start : start + GROUP]
        tell(f"measuring steps of {', '.join(group)}")
        forms = {name: step(name, depth, width, rows, tokens) for name in dict.fromkeys((STANDARD, *group))}
        timing, tried = interleave_until(
            forms, controlled=STANDARD, within=RESOLUTION, attempts=attempts, seconds=seconds, least=pairs
        )
        ratios |= {name: timing.ratio(STANDARD, name, STANDARD).to_json() for name in group}
        controls.append(tried)
        whole.append(timing.typical(STANDARD))
    return {
        "depth": depth,
        "width": width,
        "rows": rows,
        "tokens": tokens,
        "step_seconds": min(whole),
        "control": max(tried[-1] for tried in controls),
        "controls": controls,
        "ratios": ratios,
        "served": {name: served(name) for name in designs},
        "machinery": _machinery(designs, depth, width, rows * tokens, seconds, min(whole)),
    }


def _machinery(
    designs: Sequence[str], depth: int, width: int, tokens: int, seconds: float, whole: float
) -> dict[str, float]:
    """What a design's own reads and writes add to the stream's, as a share of the standard step: a lower bound, since
    real sublayers push the sources out of the caches."""
    forms = {name: stack.ours(name, depth, width, tokens) for name in (STANDARD, *designs)}
    timing = interleave(forms, controlled=STANDARD, seconds=seconds)
    return {name: (timing.least(name) - timing.least(STANDARD)) / whole for name in designs}
