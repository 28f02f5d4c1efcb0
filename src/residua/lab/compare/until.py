"""Seeds are added until the differences are resolved: to all rows alike, at looks that are fixed beforehand.

A look is judged at the level alpha / K, where K is the number of looks that the plan can have, and over all rows by
Holm (1979). Whatever decides when to stop, P(any false verdict) <= K * alpha / K = alpha: the union bound over the
looks, which is a linear spending of alpha (Lan & DeMets 1983) with every increment taken at its full cost (Bonferroni).
Pocock's (1977) constants would be narrower; they hold for a known variance, and a handful of seeds has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from residua.lab.common.files import Record
from residua.lab.common.stats import ALPHA, FEWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """When there are enough seeds."""

    half_width: float
    """Nats: stop when the interval of every row's difference reaches no further than this to either side."""
    most_seeds: int = 12
    add: int = 1
    """Seeds that each look adds to every row."""
    began: int | None = None
    """Of a plan that has grown: the seeds that it had at its first look."""

    def check(self, seeds: int) -> None:
        """Refuse what cannot be, for a plan of so many seeds."""
        if type(self.half_width) not in (int, float) or not 0 < self.half_width < math.inf:
            raise ValueError(f"until.half_width is a positive number, not {self.half_width!r}")
        if type(self.add) is not int or self.add < 1:
            raise ValueError(f"until.add is a whole number from 1 on, not {self.add!r}")
        if type(self.most_seeds) is not int or self.most_seeds < seeds:
            raise ValueError(f"until.most_seeds is at least the {seeds} seeds of the plan, not {self.most_seeds!r}")
        if seeds < FEWEST:
            raise ValueError(f"until needs {FEWEST} seeds to begin with, for an interval; the plan has {seeds}")

    def counts(self, seeds: int) -> list[int]:
        """Seeds at every look of a plan that has so many now: from those it began with to the most."""
        began = self.began or seeds
        steps = math.ceil((self.most_seeds - began) / self.add)
        return [min(began + step * self.add, self.most_seeds) for step in range(steps + 1)]

    def level(self, seeds: int) -> float:
        """The share of false verdicts that one look may spend."""
        return ALPHA / len(self.counts(seeds))

    def note(self, seeds: int, widest: float) -> str:
        """How it ended: with so many seeds, and intervals that reach at most so far to either side."""
        counts = self.counts(seeds)
        if widest <= self.half_width:
            which = "resolved"
        else:
            which = "NOT resolved when the most seeds were reached" if seeds == counts[-1] else "not resolved yet"
        return (
            f"Seeds were added to all rows until every interval reached at most {self.half_width:g} to either side: "
            f"{which}, at look {counts.index(seeds) + 1} of at most {len(counts)}, with {seeds} seeds (widest: "
            f"{widest:.4f}). For the looks, intervals are at {100 * (1 - self.level(seeds)):.4g} % and p-values are "
            f"multiplied by {len(counts)} (Bonferroni; a linear spending of alpha, Lan & DeMets 1983)."
        )


def widest_half(rows: Sequence[Record]) -> float:
    """Of the intervals of all rows of a table; infinite where one has none."""
    gaps = [row["difference"] for row in rows if row["difference"] is not None]
    return max((math.inf if gap["low"] is None else (gap["high"] - gap["low"]) / 2 for gap in gaps), default=0.0)
