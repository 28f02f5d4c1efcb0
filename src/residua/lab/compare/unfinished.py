"""What a comparison has so far: the seeds that a row shares with its baseline, and what is still missing.

A plan of many hours is looked at before its end. Each size has the seeds that its baseline has finished; a row has
those of them that it has finished too, so that every difference is over pairs. A row whose rates are not all tried has
none yet. Verdicts are corrected for all rows that the plan will have, not for those that are there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from residua.lab.common.files import Record, Values
from residua.lab.common.stats import FEWEST
from residua.lab.compare.plan import ComparePlan, Variant
from residua.lab.compare.trials import trials
from residua.lab.runs import Series, has_ended


def shared(series: Sequence[Series]) -> list[Series]:
    """The same series, each with the seeds that its baseline has as well."""
    seeds = {each.slug: {run.seed for run in each.seeds} for each in series}
    return [
        replace(each, seeds=[run for run in each.seeds if run.seed in seeds.get(each.baseline, ())]) for each in series
    ]


def untried(plan: ComparePlan, out: Path) -> dict[str, tuple[int, int]]:
    """For every row that is tuned and not yet to the end: how many of its tuning runs have ended, and of how many."""
    found: dict[str, tuple[int, int]] = {}
    for run in trials(plan, out):
        done, planned = found.get(run.variant.label, (0, 0))
        found[run.variant.label] = (done + has_ended(out / run.folder), planned + 1)
    return {label: (done, planned) for label, (done, planned) in found.items() if done < planned}


def missing(plan: ComparePlan, out: Path, series: Sequence[Series], diverged: Collection[str]) -> Values | None:
    """Which rows lack seeds or rates; None where nothing does.

    series:   of `shared`.
    diverged: labels of rows that are left out because they broke: nothing more comes of them.
    """
    counts, waiting = {each.label: len(each.seeds) for each in series}, untried(plan, out)
    rows = []
    for variant in plan.variants():
        tuned, planned = plan.tuned_as(variant).label, len(plan.seeds_of(variant))
        if variant.label in diverged or counts.get(variant.label, 0) == planned:
            continue
        trials = waiting.get(tuned)
        rows.append(
            {
                "label": variant.label,
                "design": variant.design,
                "layout": variant.layout,
                "size": str(variant.size),
                "seeds": counts.get(variant.label, 0),
                "of": planned,
                **({} if trials is None else {"trials": trials[0], "of_trials": trials[1]}),
            }
        )
    if not rows:
        return None
    owed = [variant for variant in plan.variants() if variant.label not in diverged]
    return {
        "runs": sum(counts.get(variant.label, 0) for variant in owed),
        "of": sum(len(plan.seeds_of(variant)) for variant in owed),
        "rows": rows,
    }


def note(plan: ComparePlan, found: Record) -> str:
    """What is missing in one sentence, and what a verdict is worth before the end."""
    grouped: dict[str, list[str]] = {}
    for row in found["rows"]:
        kind = f"{row['seeds']} of {row['of']} seeds"
        if not row["seeds"]:
            kind = f"rates not all tried ({row['trials']} of {row['of_trials']})" if "trials" in row else "not begun"
        grouped.setdefault(kind, []).append(row["label"])
    said = "; ".join(f"{kind}: {', '.join(_by_size(plan.variants(), labels))}" for kind, labels in grouped.items())
    return (
        f"UNFINISHED: {found['runs']} of {found['of']} runs ({said}). Differences are over the seeds that a row shares "
        "with its baseline, and verdicts are corrected for all rows of the plan. They may change: the finished table "
        "is the one to cite."
    )


def _by_size(variants: Sequence[Variant], labels: Sequence[str]) -> list[str]:
    """The labels, those of a whole size in three words."""
    named = []
    for size in dict.fromkeys(variant.size for variant in variants):
        all_of_it = [variant.label for variant in variants if variant.size == size]
        own = [label for label in all_of_it if label in labels]
        whole = len(own) == len(all_of_it) and len(own) > 1 and len(own) < len(variants)
        named += [f"all of {size}"] if whole else own
    return named


def owed(plan: ComparePlan, found: Record | None) -> int:
    """How many rows the plan will judge that have too few seeds for an interval yet; `found` is of `missing`."""
    bases = {plan.baseline_of(variant).label for variant in plan.variants()}
    rows = () if found is None else found["rows"]
    return sum(row["seeds"] < FEWEST <= row["of"] and row["label"] not in bases for row in rows)
