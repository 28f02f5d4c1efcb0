"""factor(step): the rise, the plateau, the fall and both ends."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from residua.lab.train.schedule import factor
from tests.train.harness import toy_config

SHAPES = {
    "cosine": {"schedule": "cosine", "warmup_share": 0.1, "min_lr_share": 0.1},
    "wsd": {"schedule": "wsd", "warmup_share": 0.1, "decay_share": 0.3, "min_lr_share": 0.05},
    "wsd-whole": {"schedule": "wsd", "warmup_share": 0.5, "decay_share": 0.5, "min_lr_share": 0.0},
    "no-rise": {"schedule": "cosine", "warmup_share": 0.0, "min_lr_share": 0.0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 10, 200])
def test_factor_rises_to_one_and_falls_to_the_minimum(shape, steps):
    config = toy_config(steps=steps, **shape)
    rates = [factor(config, step) for step in range(steps)]
    top = rates.index(max(rates))
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    assert all(0 <= rate <= 1 for rate in rates)
    if steps >= 10:
        assert max(rates) == 1
        assert rates[-1] == pytest.approx(config.min_lr_share)


def test_factor_has_the_written_values():
    cosine = toy_config(steps=101, schedule="cosine", warmup_share=0.0, min_lr_share=0.1)
    assert factor(cosine, 50) == pytest.approx(0.55)
    assert factor(cosine, 25) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    wsd = toy_config(steps=100, schedule="wsd", warmup_share=0.1, decay_share=0.2, min_lr_share=0.0)
    assert [factor(wsd, step) for step in (0, 9, 10, 50, 79)] == pytest.approx([1 / 11, 10 / 11, 1, 1, 1])
    assert [factor(wsd, step) for step in (80, 89, 99)] == pytest.approx([0.95, 0.5, 0.0])
