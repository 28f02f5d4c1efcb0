"""A whole training step of each design over that of `standard`, and what remains when the machine cannot resolve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from residua.lab.bench import stack
from residua.lab.bench.device import current
from residua.lab.bench.timing import STANDARD, Form, Measured, Ratio, interleave
from residua.model import ModelConfig, Transformer

RESOLUTION = 0.02
"""A step is called resolved while `standard` against itself stays within this."""


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
    designs: Sequence[str], *, depth: int, width: int, rows: int, tokens: int, seconds: float, pairs: int, attempts: int
) -> Measured:
    """Step time over that of `standard`: every design interleaved with it, at least `pairs` rounds an attempt.

    The run is repeated up to `attempts` times until the control is within RESOLUTION; every attempt is reported.
    """
    forms = {name: step(name, depth, width, rows, tokens) for name in (STANDARD, *designs)}
    tried: list[dict[str, Ratio]] = []
    for _ in range(attempts):
        timing = interleave(forms, controlled=STANDARD, seconds=seconds, least=pairs)
        tried.append({name: timing.ratio(STANDARD, name, STANDARD) for name in designs})
        if max(ratio.control for ratio in tried[-1].values()) <= RESOLUTION:
            break
    best = min(tried, key=lambda ratios: max(ratio.control for ratio in ratios.values()))
    return {
        "depth": depth,
        "width": width,
        "rows": rows,
        "tokens": tokens,
        "step_seconds": timing.typical(STANDARD),
        "resolved": max(ratio.control for ratio in best.values()) <= RESOLUTION,
        "ratios": {name: ratio.to_json() for name, ratio in best.items()},
        "attempts": [{name: ratio.to_json() for name, ratio in ratios.items()} for ratios in tried],
        "machinery": _machinery(designs, depth, width, rows * tokens, seconds / 4, timing.typical(STANDARD)),
    }


def _machinery(
    designs: Sequence[str], depth: int, width: int, tokens: int, seconds: float, whole: float
) -> dict[str, float]:
    """What a design's own reads and writes add to the stream's, as a share of the standard step: a lower bound, since
    real sublayers push the sources out of the caches."""
    forms = {name: stack.ours(name, depth, width, tokens) for name in (STANDARD, *designs)}
    timing = interleave(forms, controlled=STANDARD, seconds=seconds)
    return {name: (timing.least(name) - timing.least(STANDARD)) / whole for name in designs}
