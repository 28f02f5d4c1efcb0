"""What the seeds can tell: paired differences, Student's interval, the smallest difference they could detect, and
verdicts over many rows at once (Holm 1979)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

LEVEL = 0.95
ALPHA = 1 - LEVEL
"""The share of experiments without a true difference in which a verdict may be given all the same."""
POWER = 0.8
FEWEST = 3
"""Seeds below which no interval is given: with two, Student's quantile alone is 12.7."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds; the sample standard deviation from two on."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a row from its baseline, seed by seed."""

    mean: float
    low: float | None
    high: float | None
    """Ends of the interval of the mean, at 95 % unless a smaller `alpha` was asked for; None below three seeds."""
    detectable: float | None
    """The smallest true difference that these seeds would find at this level with a chance of 80 %."""
    seeds: int
    p: float | None = None
    """Of Student's test that the mean is zero; None below three seeds."""

    @property
    def significant(self) -> bool | None:
        """Whether the interval leaves out zero; None where there is none."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired(own: Sequence[float], baseline: Sequence[float], alpha: float = ALPHA, tests: int = 1) -> Difference:
    """The mean of own - baseline over seeds that both ran, with Student's interval for pairs at the level 1 - alpha.

    One seed gives both runs the same sublayer weights and batches, so that their common luck cancels.

    tests: how many differences are judged together: Holm calls the clearest of them significant at alpha / tests, and
           what is detectable is found at that level. The interval is that of one difference by itself.
    """
    gaps = [a - b for a, b in zip(own, baseline, strict=True)]
    count = len(gaps)
    if count < FEWEST:
        return Difference(fmean(gaps), None, None, None, count)
    error = stdev(gaps) / math.sqrt(count)
    reach = student(1 - alpha / 2, count - 1)
    half = reach * error
    mean = fmean(gaps)
    least = found_at(alpha / max(tests, 1), count - 1) * error
    return Difference(mean, mean - half, mean + half, least, count, two_sided(mean, error, count - 1))


def two_sided(mean: float, error: float, freedom: int) -> float:
    """The p-value of a mean with this standard error, if the truth is zero."""
    if not error:
        return float(not mean)
    return max(0.0, 2 * (1 - _below(abs(mean / error), freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: calling those at most alpha true errs anywhere in at most alpha of experiments (Holm 1979)."""
    count, running = len(p_values), 0.0
    adjusted = [0.0] * count
    for place, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        running = max(running, min(1.0, (count - place) * p_values[index]))
        adjusted[index] = running
    return adjusted


@lru_cache(maxsize=4096)
def student(probability: float, freedom: int) -> float:
    """The quantile of Student's t: the t below which lies this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies between 0 and 1, not {probability}")
    if probability < 0.5:
        return -student(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=4096)
def found_at(alpha: float, freedom: int) -> float:
    """The true mean, in standard errors, that Student's two-sided test at the level alpha finds with `POWER`.

    P(|T| > c) of the noncentral t is the mean of normal tails over the chi distribution of the estimated error. (The
    usual sum of two quantiles is too small where seeds are few or rows are many: its power is 74 % with 5 seeds and 7
    rows.)
    """
    limit, steps = student(1 - alpha / 2, freedom), 2000
    width = (1 + 9 / math.sqrt(freedom)) / steps  # the error over the true one, beyond which no share is left
    places = [(step + 0.5) * width for step in range(steps)]
    scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    shares = [width * math.exp(scale + (freedom - 1) * math.log(s) - freedom * s * s / 2) for s in places]

    def power(mean: float) -> float:
        tails = ((limit * s - mean, limit * s + mean) for s in places)
        return sum(share * (_above(near) + _above(far)) for share, (near, far) in zip(shares, tails, strict=True))

    low, high = 0.0, 2 * (limit + student(POWER, freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < POWER else (low, middle)
    return (low + high) / 2


def _above(z: float) -> float:
    """P(Z > z) of the normal distribution."""
    return math.erfc(z / math.sqrt(2)) / 2


def _below(t: float, freedom: int) -> float:
    """P(T < t) by the finite sums that Student's distribution has for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if freedom % 2:
        term = total = math.cos(angle) if freedom > 1 else 0.0
        for i in range(3, freedom - 1, 2):
            term *= square * (i - 1) / i
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for i in range(2, freedom - 1, 2):
            term *= square * (i - 1) / i
            total += term
        inside = sine * total
    return (1 + inside) / 2
