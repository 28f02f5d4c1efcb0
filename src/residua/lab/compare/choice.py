"""The rates that tuning chose, where a rule carried them, and what its check found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Values
from residua.lab.compare.plan import ComparePlan, Run, Variant
from residua.lab.compare.trials import FLAT, best_rates, by_row, in_question, losses, trials
from residua.lab.compare.unfinished import untried
from residua.lab.runs import final_loss, has_ended, rounded


def choose_rates(plan: ComparePlan, out: Path) -> dict[str, dict[str, float]]:
    """For every row the best of its rates on the tuning seeds, as `trials` has it.

    A rate that diverged on any of them is none to choose; a row with no other has no entry, nor has one whose rates are
    not all tried yet.
    """
    waiting = untried(plan, out)
    chosen = {}
    for label, runs in by_row(trials(plan, out)).items():
        if label not in waiting and (best := best_rates(plan, losses(plan, runs, out))) is not None:
            chosen[label] = dict(best)
    carried = {}
    for variant in plan.variants():
        tuned = plan.tuned_as(variant)
        if tuned.label in chosen:
            factor = plan.tune.factor(variant.size, tuned.size)
            carried[variant.label] = {
                key: rate if factor == 1 else rounded(rate * factor) for key, rate in chosen[tuned.label].items()
            }
    return carried


def reported(plan: ComparePlan, out: Path) -> list[Run]:
    """The runs of the table at the rates chosen for their rows; none of a row whose every rate diverged."""
    rates, lost = choose_rates(plan, out), rateless(plan, out)
    for variant in plan.variants():
        if variant.label in lost and plan.baseline_of(variant) == variant:
            raise ValueError(
                f"every rate of the baseline {variant.label} diverged, and nothing can be compared with it; give "
                "smaller ones and another --out"
            )
    return [run for run in plan.runs(rates) if run.variant.label in rates or not plan.tune.lr]


def rateless(plan: ComparePlan, out: Path) -> set[str]:
    """Labels of rows whose every rate was tried, and diverged."""
    rates, waiting = choose_rates(plan, out), untried(plan, out)
    tuned = [(variant.label, plan.tuned_as(variant).label) for variant in plan.variants() if plan.tune.lr]
    return {label for label, at in tuned if label not in rates and at not in waiting}


def conceded(plan: ComparePlan, out: Path) -> dict[str, tuple[Mapping[str, float], float]]:
    """Rows that were given a smaller rate than their best, as `tune.close` has it: the best, and by how much it is."""
    found: dict[str, tuple[Mapping[str, float], float]] = {}
    waiting = untried(plan, out)
    for label, runs in by_row(trials(plan, out)).items():
        tried = losses(plan, runs, out)
        chosen = None if label in waiting else best_rates(plan, tried)
        if chosen is None:
            continue
        best = min(in_question(plan, tried), key=lambda rates: (fmean(tried[rates]), rates))
        if best != chosen:
            found[label] = dict(best), fmean(tried[chosen]) - fmean(tried[best])
    return found


def check_rule(plan: ComparePlan, out: Path, chosen: Mapping[str, Mapping[str, float]]) -> list[Values]:
    """What the check of the rule found: for each row the losses at three rates around the one that it predicts.

    Nothing of a row whose check has not ended.
    """
    found: dict[str, dict[float, list[float]]] = {}
    runs = plan.checking(chosen)
    waiting = {run.variant.label for run in runs if not has_ended(out / run.folder)}
    for run in (run for run in runs if run.variant.label not in waiting):
        found.setdefault(run.variant.label, {}).setdefault(run.config.lr, []).append(final_loss(out / run.folder))
    rows = []
    for label, by_rate in found.items():
        means = {rate: fmean(each) for rate, each in by_rate.items()}
        predicted, best = chosen[label]["lr"], min(means, key=lambda rate: (means[rate], rate))
        lost = means[predicted] - means[best]
        rows.append(
            {
                "label": label,
                "predicted": predicted,
                "best": best,
                "rates": [{"lr": rate, "loss": loss if loss < math.inf else None} for rate, loss in means.items()],
                "lost": lost if lost < math.inf else None,
                "holds": best == predicted,
            }
        )
    return rows


def widest_stable(plan: ComparePlan, out: Path, variant: Variant) -> tuple[float, bool] | None:
    """The largest rate of the grid up to which every rate is stable, and whether the grid ends there.

    Stable: on no tuning seed did a run diverge, and the mean loss is at most a tenth above that of the best rate, so
    that a run that broke and stayed finite does not count. None where rates were not tuned, or none is stable.
    """
    found: dict[float, list[float]] = {}
    tuned = plan.tuned_as(variant)
    for run in trials(plan, out):
        if run.variant == tuned:
            found.setdefault(run.config.lr, []).append(final_loss(out / run.folder))
    if not found:
        return None
    means = {rate: fmean(each) for rate, each in sorted(found.items())}
    limit = (1 + FLAT) * min(means.values())
    widest = None
    for rate, mean in means.items():
        if not mean <= limit or mean == math.inf:
            break
        widest = rate
    factor = plan.tune.factor(variant.size, tuned.size)
    return None if widest is None else (rounded(widest * factor), widest == max(means))
