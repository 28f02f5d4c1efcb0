"""Ratios say what a run can resolve, and refuse the rest."""

import itertools
import time

import pytest

from residua.lab.bench import Ratio, Timing, interleave
from residua.lab.bench.timing import CONTROL, exponent


def busy(seconds):
    def run():
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    return run


def test_interleave_finds_a_known_ratio():
    timing = interleave({"one": busy(2e-3), "three": busy(6e-3)}, controlled="one", seconds=0.3)
    ratio = timing.ratio("one", "three", "one")
    assert ratio.value == pytest.approx(3, rel=0.1)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.rounds == len(timing.seconds[CONTROL]) >= 5


def test_interleave_runs_every_form_once_a_round_in_rotating_order():
    seen = []
    forms = {name: (lambda name=name: (seen.append(name), busy(3e-3)())) for name in "ab"}
    timing = interleave(forms, controlled="a", seconds=0.0, least=3)
    untimed, timed = seen[-18::2], seen[-17::2]
    assert untimed == timed  # a short form is timed after itself, whatever ran before
    rounds = [timed[i : i + 3] for i in range(0, 9, 3)]
    assert all(sorted(one) == ["a", "a", "b"] for one in rounds)
    assert rounds[0] != rounds[1]
    assert {len(times) for times in timing.seconds.values()} == {3}


@pytest.mark.parametrize(
    ("value", "control", "resolved"),
    [
        (30.0, 0.05, True),
        (1.04, 0.05, False),
        (1.30, 0.05, True),
        (0.97, 0.05, False),
        (0.80, 0.05, True),
        (30.0, 0.30, False),  # a machine that differs from itself by 30 % resolves nothing
    ],
)
def test_ratio_within_its_control_is_not_shown(value, control, resolved):
    ratio = Ratio(value, 0.99 * value, 1.01 * value, control, 40)
    assert ratio.resolved is resolved
    assert (str(ratio) == "n.r.") is not resolved
    assert ratio.to_json()["resolved"] is resolved


def test_control_is_the_larger_of_bias_and_spread():
    steady = {"a": [1.0] * 20, "b": [2.0] * 20, CONTROL: [1.1] * 20}
    assert Timing(steady).ratio("a", "b", "a").control == pytest.approx(0.1)
    swinging = {"a": [1.0] * 20, "b": [2.0] * 20, CONTROL: list(itertools.islice(itertools.cycle([0.7, 1.3]), 20))}
    assert Timing(swinging).ratio("a", "b", "a").control == pytest.approx(0.3)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.6, 2.0])
def test_exponent_recovers_a_power(power):
    assert exponent([6, 12, 24, 48], [3 * size**power for size in (6, 12, 24, 48)]) == pytest.approx(power)
