"""Student against printed tables and scipy, paired intervals by hand, verdicts over rows and looks by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from residua.lab.common.stats import ALPHA, found_at, holm, paired, spread, student
from residua.lab.compare.until import Until


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
    assert found.detectable == pytest.approx(found_at(0.05, 2) / math.sqrt(3))
    assert found.significant is False


@pytest.mark.parametrize("freedom", [2, 3, 4, 11, 40])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 7, 0.05 / 50])
def test_detectable_difference_has_the_power_that_it_says(alpha, freedom):
    """By scipy's noncentral t."""
    limit, mean = stats.t.ppf(1 - alpha / 2, freedom), found_at(alpha, freedom)
    power = stats.nct.sf(limit, freedom, mean) + stats.nct.cdf(-limit, freedom, mean)
    assert power == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize(("seeds", "rows"), [(5, 1), (5, 7), (12, 3)])
def test_detectable_difference_is_found_about_as_often_as_it_says(seeds, rows):
    """The clearest of so many rows, judged by Holm, where the other rows differ in nothing: simulated."""
    draw, found, rounds = np.random.default_rng(0), 0, 2000
    least = paired(list(np.linspace(-1, 1, seeds) / np.linspace(-1, 1, seeds).std(ddof=1)), [0.0] * seeds, tests=rows)
    for _ in range(rounds):
        gaps = draw.normal(0, 1, (rows, seeds))
        gaps[0] += least.detectable
        p_values = [paired(list(row), [0.0] * seeds).p for row in gaps]
        found += holm(p_values)[0] <= 0.05
    assert found / rounds == pytest.approx(0.8, abs=0.03)


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


@pytest.mark.parametrize("freedom", [2, 3, 4, 9, 11, 40])
def test_student_is_that_of_scipy(freedom):
    for probability in (0.6, 0.8, 0.975, 0.995, 1 - 0.05 / 10 / 33 / 2):
        assert student(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 12])
def test_paired_test_is_that_of_scipy(count):
    """Mean, interval and p-value, at 95 % and at the level of one of ten looks."""
    draw = np.random.default_rng(count)
    own, base = draw.normal(3.0, 0.1, count), draw.normal(3.05, 0.1, count)
    found = stats.ttest_rel(own, base)
    for alpha in (0.05, 0.005):
        gap = paired(own.tolist(), base.tolist(), alpha)
        interval = found.confidence_interval(1 - alpha)
        assert gap.p == pytest.approx(found.pvalue, rel=1e-9)
        assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_p_of_seeds_that_agree_exactly():
    assert paired([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).p == 0.0
    assert paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).p == 1.0
    assert paired([1.0, 2.0], [1.0, 3.0]).p is None


def test_holm_by_hand():
    """The example of four tests: multiplied by 4, 3, 2, 1 from the smallest on, and never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_holm_rejects_what_its_definition_rejects():
    """Step down: p(i) <= alpha / (m - i) for all up to i."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        p = draw.uniform(0, 0.1, 7).tolist()
        order, rejected = sorted(range(7), key=p.__getitem__), set()
        for place, index in enumerate(order):
            if p[index] > 0.05 / (7 - place):
                break
            rejected.add(index)
        assert {index for index, value in enumerate(holm(p)) if value <= 0.05} == rejected


def judged(gaps, until, began):
    """Which experiments give a verdict, when every one stops by its own widths: rows x experiments of gaps by seed.

    All at once: `student` gives the critical values of every look and of every step of Holm.
    """
    rows, experiments, _ = gaps.shape
    verdict, running = np.zeros(experiments, bool), np.ones(experiments, bool)
    counts, level = until.counts(began), until.level(began)
    for count in counts:
        seen = gaps[:, :, :count]
        error = seen.std(2, ddof=1) / math.sqrt(count)
        half = student(1 - level / 2, count - 1) * error
        steps = np.array([student(1 - level / (2 * (rows - place)), count - 1) for place in range(rows)])
        t = np.sort(np.abs(seen.mean(2) / error), axis=0)[::-1]
        any_true = t[0] > steps[0]  # Holm rejects something if and only if it rejects the first
        stops = running & ((half.max(0) <= until.half_width) | (count == counts[-1]))
        verdict |= stops & any_true
        running &= ~stops
    return verdict


@pytest.mark.parametrize(
    ("rows", "half_width", "shared"),
    [(1, 0.01, 0.0), (10, 0.01, 1.0), (10, 0.02, 0.0), (10, 1e-9, 1.0), (33, 0.015, 1.0)],
)
def test_family_wise_rate_over_sequential_looks(rows, half_width, shared):
    """10,000 experiments without a true difference, stopped by their own widths: at most 5 % give any verdict.

    shared: how much of the noise is the baseline's, which all rows are compared with.
    """
    draw = np.random.default_rng(rows)
    until = Until(half_width=half_width, most_seeds=12)
    own = draw.normal(0, 0.01, (rows, 10_000, 12))
    gaps = own - shared * draw.normal(0, 0.01, (1, 10_000, 12))
    assert judged(gaps, until, 3).mean() <= 0.05


def test_looks_without_correction_would_exceed_the_rate():
    """What the correction is for: the same experiments, judged at 5 % at every look until one gives a verdict."""
    gaps = np.random.default_rng(1).normal(0, 0.01, (1, 10_000, 12))
    found = np.zeros(10_000, bool)
    for count in range(3, 13):
        seen = gaps[0, :, :count]
        found |= np.abs(seen.mean(1)) > student(0.975, count - 1) * seen.std(1, ddof=1) / math.sqrt(count)
    assert found.mean() > 0.10


def test_simulated_verdicts_are_those_of_the_table():
    """The verdicts of `judged` are those of `paired` and `holm`, look by look."""
    draw = np.random.default_rng(3)
    gaps = draw.normal(0.004, 0.01, (4, 60, 8))
    until = Until(half_width=0.012, most_seeds=8)
    expected = []
    for one in range(60):
        for count in until.counts(3):
            found = [paired(gaps[row, one, :count].tolist(), [0.0] * count, until.level(3)) for row in range(4)]
            if max((gap.high - gap.low) / 2 for gap in found) <= until.half_width:
                break
        adjusted = holm([gap.p for gap in found])
        expected.append(min(adjusted) * len(until.counts(3)) <= ALPHA)
    assert judged(gaps, until, 3).tolist() == expected
    assert 0 < sum(expected) < 60
