"""trials(plan, out): the runs that choose the rates, as far as those that ended tell.

Without `tune.close` every rate of the grid is tried on every tuning seed. With it the grid is tried on the first of
them, and on the others only what is still in question:

    { r : r broke on no seed, loss(r, first) <= min loss(., first) + close },   where that is more than one rate.

Chosen is the smallest of them whose mean loss is within `close` of the lowest. Seeds rank rates by chance where they
lie closer than their noise, and of two that cannot be told apart the larger is nearer to where training breaks, if not
on these seeds. To break is to diverge, or to end a tenth above the row's best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from residua.lab.compare.plan import ComparePlan, Run
from residua.lab.runs import final_loss, has_ended

FLAT = 0.1
"""A rate is stable if its loss is at most this share above that of the row's best."""
Rates = tuple[tuple[str, float], ...]
Losses = Mapping[Rates, Sequence[float]]
"""Of every rate that was tried on the first seed, its losses by seed."""


def trials(plan: ComparePlan, out: Path) -> list[Run]:
    """In the order of the plan; those that later ones depend on, where they have not ended."""
    found = []
    first = plan.tune.seeds[0]
    for runs in by_row(plan.tuning()).values():
        heat = [run for run in runs if plan.tune.close is None or run.config.seed == first]
        if len(heat) < len(runs) and all(has_ended(out / run.folder) for run in heat):
            close = in_question(plan, losses(plan, runs, out))
            more = close if len(close) > 1 else ()
            heat = [run for run in runs if run in heat or rates_of(plan, run) in more or has_ended(out / run.folder)]
        found += heat
    return found


def best_rates(plan: ComparePlan, found: Losses) -> Rates | None:
    """The smallest of the rates in question whose mean loss over their seeds is the lowest, or as good as that. None
    where every one diverged."""
    means = {rates: fmean(found[rates]) for rates in in_question(plan, found)}
    limit = min(means.values(), default=math.inf) + (plan.tune.close or 0.0)
    return min((rates for rates, mean in means.items() if mean <= limit), default=None)


def in_question(plan: ComparePlan, found: Losses) -> list[Rates]:
    """Rates that may turn out the best; without `tune.close` all that never diverged."""
    alive = [rates for rates, by_seed in found.items() if max(by_seed) < math.inf]
    if plan.tune.close is None or not alive:
        return alive
    limit = (1 + FLAT) * min(min(found[rates]) for rates in alive)
    alive = [rates for rates in alive if max(found[rates]) <= limit] or alive
    least = min(found[rates][0] for rates in alive)
    return [rates for rates in alive if found[rates][0] <= least + plan.tune.close]


def losses(plan: ComparePlan, runs: Sequence[Run], out: Path) -> Losses:
    """What those of a row's runs that ended came to."""
    found: dict[Rates, list[float]] = {}
    for run in runs:
        if has_ended(out / run.folder):
            found.setdefault(rates_of(plan, run), []).append(final_loss(out / run.folder))
    return found


def rates_of(plan: ComparePlan, run: Run) -> Rates:
    """The rates that a run was made with."""
    return tuple((key, getattr(run.config, key)) for key in plan.rates(run.variant)[0])


def by_row(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of every row, by its label."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.variant.label, []).append(run)
    return rows
