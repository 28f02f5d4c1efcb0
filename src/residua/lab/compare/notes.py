"""What a reader must know before believing a table, a sentence each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from residua.lab.common.tables import rates as shown_rates
from residua.lab.compare.choice import conceded
from residua.lab.compare.plan import ComparePlan
from residua.lab.compare.row import Broken, Row
from residua.lab.runs import Series


def of_the_table(plan: ComparePlan, rows: Sequence[Row], corpora: int, *, paced: bool) -> list[str]:
    """What a reader must know before believing the table. paced: its seconds are of one machine, wherever it ran."""
    said = []
    if len(plan.seeds) < 3:
        said.append(f"{len(plan.seeds)} seed(s): no interval is given below three, and no difference is judged.")
    bases = {row.size: row for row in rows if row.baseline}
    if not plan.tune.lr and not plan.chosen:
        said.append(
            "One learning rate for all, not tuned: a design that likes another rate is misjudged. --lr-grid tunes each."
        )
    said += [
        f"{row.label}: its rate {shown_rates(row.rates, row.stream_parameters)} is at the edge of the grid; "
        "a better one may lie outside."
        for row in rows
        if row.edge
    ]
    grids = {variant.label: len(plan.rates(plan.tuned_as(variant))) for variant in plan.variants()}
    said += [
        f"{row.label} was tuned by {row.trials} runs and the baseline {bases[row.size].label} by "
        f"{bases[row.size].trials}."
        for row in rows
        if grids[row.label] > grids[bases[row.size].label]
    ]
    kinds = sorted({kind for row in rows for kind in row.hardware.split("; ") if kind})
    if len(kinds) > 1:
        said.append(
            f"{len(kinds)} kinds of hardware ({'; '.join(kinds)}): "
            + (
                "memory is compared within one kind only."
                if paced
                else "speed and memory are compared within one kind only, and there is no equal time."
            )
        )
    builds = sorted({build for row in rows for build in row.build.split("; ") if build})
    if len(builds) > 1:
        said.append(f"{len(builds)} builds ({'; '.join(builds)}): their sums round differently, and so may a loss.")
    if corpora > 1:
        said.append("FORCED: these runs saw different corpora or tokenizers; their losses do not compare.")
    return said


def smaller_rates(plan: ComparePlan, out: Path) -> list[str]:
    """What rows may have lost to the rule that of rates as good as the best the smallest is taken."""
    rows = [
        f"{lost:.4f} for {label} ({' / '.join(f'{rate:g}' for rate in rates.values())})"
        for label, (rates, lost) in conceded(plan, out).items()
    ]
    rule = f"Of rates within {plan.tune.close} nats of the best on the tuning seeds the smallest is taken"
    return [f"{rule}; the best ended lower by {', '.join(rows)}."] if rows else []


def breaks(plan: ComparePlan, lost: Collection[str], untuned: Sequence[Broken], failed: Sequence[Broken]) -> list[str]:
    """A sentence for every row that runs broke in: rates that are none to choose, or why it has no line."""
    said = []
    for label, at in ((variant.label, plan.tuned_as(variant).label) for variant in plan.variants()):
        rates, seeds = ([one for one in broken if one["label"] == label] for broken in (untuned, failed))
        if label in lost:
            last = (seeds or [one for one in untuned if one["label"] == at])[-1]
            which = last["folder"].rpartition("/")[2] if seeds else "every rate"
            said.append(f"{label} is LEFT OUT: {which} diverged ({last['folder']}, {last['message']}).")
        elif rates:
            tried = ", ".join(f"{rate:g}" for rate in dict.fromkeys(one["lr"] for one in rates))
            said.append(f"{label}: diverged while tuning at lr {tried}.")
    return said


def repeated_text(series: Sequence[Series]) -> list[str]:
    """What is said of runs that passed their text more than twice: their losses are of text that they have seen."""
    most = max((run.result.get("passes", 0) for each in series for run in each.seeds), default=0)
    return [f"Runs passed their text up to {most:.1f} times: the table is of repeated text."] if most > 2 else []
