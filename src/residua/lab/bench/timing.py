"""ratio = median over rounds of t_other / t_subject, from one interleaved run that times one form twice.

Absolute times on a shared machine mean little: its neighbours come and go. So every form runs once a round, in an
order that rotates; a ratio is taken inside each round; and the control, one form against itself, says how far a
ratio of 1 strays here and now. What lies within that is not resolved, and no number is shown for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median

from residua.lab.bench.device import now
from residua.lab.common.files import Values

Form = Callable[[], object]
"""What is timed."""

Measured = Values
"""Plain values, as a results file holds them."""

STANDARD = "standard"
"""The design that others are measured against."""

CONTROL = "control"
"""The label of the second timing of the form that is its own control."""

SHORT = 0.05
"""Seconds: a longer form fills the caches with its own in a small part of its time."""

ENOUGH = 2e-3
"""Seconds that the clock needs to time a sample: what is faster is repeated."""

TOO_NOISY = 0.25
"""Above this control nothing is resolved: a form that differs from itself by a quarter can hide any claim."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Slowdown of another implementation, with what the run can resolve."""

    value: float
    low: float
    """Ends of the 95 % interval of the median over rounds."""
    high: float
    control: float
    """How far the control strays from 1: the larger of its median's distance and its interval's half-width."""
    rounds: int

    @property
    def resolved(self) -> bool:
        """Whether the interval, widened by the control, leaves out 1."""
        return self.control <= TOO_NOISY and (self.low / (1 + self.control) > 1 or self.high * (1 + self.control) < 1)

    def __str__(self) -> str:
        return f"{self.value:.{2 if self.value < 10 else 1}f}x" if self.resolved else "n.r."

    def to_json(self) -> dict[str, object]:
        """Plain values; `value` stays in the file even where it is not resolved, marked as such."""
        return {**asdict(self), "resolved": self.resolved}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, per form and round: of the processor, or of a GPU."""

    seconds: Mapping[str, Sequence[float]]

    def typical(self, form: str) -> float:
        """The median over rounds."""
        return median(self.seconds[form])

    def least(self, form: str) -> float:
        """The least disturbed round."""
        return min(self.seconds[form])

    def then(self, later: Timing) -> Timing:
        """The rounds of both."""
        return Timing({form: [*taken, *later.seconds[form]] for form, taken in self.seconds.items()})

    def ratio(self, subject: str, other: str, controlled: str) -> Ratio:
        """Slowdown of `other` over `subject`; `controlled` was timed twice, as the A/A control."""
        value, low, high = _median_interval(self._paired(other, subject))
        centre, below, above = _median_interval(self._paired(CONTROL, controlled))
        control = max(abs(centre - 1), (above - below) / 2)
        return Ratio(value, low, high, control, len(self.seconds[subject]))

    def _paired(self, upper: str, lower: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[upper], self.seconds[lower], strict=True)]


def interleave(
    forms: Mapping[str, Form], *, controlled: str, seconds: float, least: int = 5, most: int = 400
) -> Timing:
    """Time every form, and `controlled` a second time, in rounds, until the budget is spent.

    Fast forms are repeated inside a round until a sample is long enough for the clock. A short form runs once untimed
    before it is timed: all then find the caches as their own kind leaves them, and not one of them as its control does.
    """
    first = {label: _warm(form) for label, form in forms.items()}
    first[CONTROL] = first[controlled]  # the same work, or it would be no control
    labelled = dict(forms) | {CONTROL: forms[controlled]}
    repeats = {label: max(1, math.ceil(ENOUGH / max(took, 1e-7))) for label, took in first.items()}
    short = {label for label, took in first.items() if took < SHORT}
    taken: dict[str, list[float]] = {label: [] for label in labelled}
    order, spent = list(labelled), 0.0
    while len(taken[CONTROL]) < least or (spent < seconds and len(taken[CONTROL]) < most):
        for label in order:
            if label in short:
                labelled[label]()
            took = _sample(labelled[label], repeats[label])
            taken[label].append(took)
            spent += took * repeats[label]
        order = order[1:] + order[:1]
    return Timing(taken)


def interleave_until(
    forms: Mapping[str, Form], *, controlled: str, within: float, attempts: int, seconds: float = 0.0, least: int = 5
) -> tuple[Timing, list[float]]:
    """`interleave`, with as many rounds again while the control strays further than `within`, up to `attempts` times in
    all; the timing of all rounds, and the control after every attempt."""
    timing: Timing | None = None
    tried: list[float] = []
    while len(tried) < attempts and (not tried or tried[-1] > within):
        more = interleave(forms, controlled=controlled, seconds=seconds, least=least)
        timing = more if timing is None else timing.then(more)
        tried.append(timing.ratio(controlled, controlled, controlled).control)
    assert timing is not None
    return timing, tried


def _warm(form: Form) -> float:
    form()  # allocations, lazy builds, compilation
    return _sample(form, 1)


def _sample(form: Form, repeats: int) -> float:
    start = now()
    for _ in range(repeats):
        form()
    return (now() - start) / repeats


def _median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the order statistics that hold it 95 times in 100 (all values, below six of them)."""
    ranked, count = sorted(values), len(values)
    reach = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2)) if count >= 6 else 0
    return median(ranked), ranked[reach], ranked[count - 1 - reach]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """p of cost ~ size^p, by least squares on logarithms."""
    return linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope
