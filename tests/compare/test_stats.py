"""Student's quantiles against printed tables, and paired intervals by hand."""

import math

import pytest

from residua.lab.common.stats import paired, spread, student


@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    [
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262),
        (0.975, 30, 2.042), (0.95, 5, 2.015), (0.8, 2, 1.061), (0.995, 10, 3.169), (0.5, 7, 0.0), (0.025, 2, -4.303),
    ],
)  # fmt: skip
def test_student_quantile_is_the_printed_one(probability, freedom, t):
    assert student(probability, freedom) == pytest.approx(t, abs=6e-4)


def test_student_tends_to_the_normal():
    assert student(0.975, 20_001) == pytest.approx(1.95996, abs=2e-4)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 1.1])
def test_student_refuses_what_is_no_probability(probability):
    with pytest.raises(ValueError, match="between 0 and 1"):
        student(probability, 3)


def test_paired_interval_by_hand():
    """Gaps -1, -2, -3: mean -2, deviation 1, half-width 4.3027 / sqrt(3)."""
    found = paired([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    half = 4.302653 / math.sqrt(3)
    assert found.mean == -2
    assert found.low == pytest.approx(-2 - half, abs=1e-5)
    assert found.high == pytest.approx(-2 + half, abs=1e-5)
    assert found.detectable == pytest.approx((4.302653 + 1.060660) / math.sqrt(3), abs=1e-5)
    assert found.significant is False


def test_common_luck_of_a_seed_cancels():
    """Losses that differ by seed far more than by design still tell the designs apart when paired."""
    luck = [0.0, 5.0, -3.0]
    found = paired([x + 1.0 + e for x, e in zip(luck, (0.01, -0.01, 0.0), strict=True)], luck)
    assert found.significant
    assert found.mean == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 2])
def test_no_interval_below_three_seeds(count):
    found = paired([1.0] * count, [0.5] * count)
    assert found.mean == 0.5
    assert (found.low, found.high, found.detectable, found.significant) == (None, None, None, None)


def test_spread_of_one_seed_has_no_deviation():
    assert spread([2.0]).deviation is None
    assert spread([1.0, 3.0]).deviation == pytest.approx(math.sqrt(2))
