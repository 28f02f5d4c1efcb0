"""What the seeds can tell: paired differences, Student's interval, and the smallest difference they could detect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95
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
    """Ends of the 95 % interval of the mean; None below three seeds."""
    detectable: float | None
    """The smallest true difference that these seeds would find at this level with a chance of 80 %."""
    seeds: int

    @property
    def significant(self) -> bool | None:
        """Whether the interval leaves out zero; None where there is none."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired(own: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The mean of own - baseline over seeds that both ran, with Student's interval for pairs.

    One seed gives both runs the same sublayer weights and batches, so that their common luck cancels.
    """
    gaps = [a - b for a, b in zip(own, baseline, strict=True)]
    count = len(gaps)
    if count < FEWEST:
        return Difference(fmean(gaps), None, None, None, count)
    error = stdev(gaps) / math.sqrt(count)
    reach = student(1 - (1 - LEVEL) / 2, count - 1)
    half = reach * error
    mean = fmean(gaps)
    return Difference(mean, mean - half, mean + half, (reach + student(POWER, count - 1)) * error, count)


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
