"""The answer of a comparison: a row per design with its spread, its difference from the baseline, and its cost."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Values, versions
from residua.lab.common.stats import ALPHA, FEWEST, holm, paired, spread
from residua.lab.compare import ladder, notes, pace, unfinished
from residua.lab.compare.choice import choose_rates, rateless, reported, widest_stable
from residua.lab.compare.ladder import Ladder
from residua.lab.compare.plan import ComparePlan, Run
from residua.lab.compare.row import Broken, Row
from residua.lab.compare.series import of_comparison
from residua.lab.compare.table import to_html
from residua.lab.compare.trials import trials
from residua.lab.compare.until import widest_half
from residua.lab.compare.verdict import in_words
from residua.lab.runs import FinishedRun, Series, divergence, final_loss, has_ended, read_updates

FORMAT = 1


class Results(Values):
    """The answer of a comparison: plain values, as results.json holds them. A notebook shows its table."""

    series: Sequence[Series] = ()
    """The runs that it was made from."""

    def _repr_html_(self) -> str:
        if not self.series:
            return to_html(self)
        from residua.lab import figures
        from residua.lab.plots.notebook import comparison_html

        gaps = [
            (row["label"], row["difference"] | {"words": in_words(row["difference"])})
            for row in self["rows"]
            if row["difference"] is not None
        ]
        return to_html(self) + comparison_html(figures.collect(self.series), gaps)


def collect(
    plan: ComparePlan,
    out: Path,
    read: Sequence[Series] | None = None,
    *,
    force: bool = False,
    so_far: bool = False,
    command: str = "",
) -> Results:
    """Everything the tables and files are made from. Every run must be there and of one corpus.

    read:   the runs in `out`, where somebody has read them already.
    force:  put runs of different corpora in one table.
    so_far: make them from the runs that are there; `unfinished` then says which are not.

    A row of which a reported run diverged is left out whole, and a note says so: the mean of the seeds that it
    survived would flatter it.
    """
    begun = reported(plan, out)
    untuned, failed = _broken(out, trials(plan, out)), _broken(out, begun)
    rows_begun = {run.variant.label: run for run in reversed(begun)}  # the first run of each
    read = unfinished.shared(of_comparison(plan, out) if read is None else read)
    lost = {one["label"] for one in failed} | rateless(plan, out)
    series = [each for each in read if each.label in rows_begun and each.label not in lost and each.seeds]
    left = unfinished.missing(plan, out, series, lost)
    owed = unfinished.owed(plan, left)
    if left is not None and not so_far:
        first = left["rows"][0]
        raise ValueError(f"{first['label']} has {first['seeds']} of {first['of']} seeds; finish the comparison first")
    if not series:
        raise ValueError(
            f"{out} has no finished run of the baseline and of its rates yet; train some of the plan first"
        )
    fingerprints = {run.result["fingerprint"] for each in series for run in each.seeds}
    if len(fingerprints) > 1 and not force:
        raise ValueError(
            f"these runs saw {len(fingerprints)} corpora or tokenizers ({', '.join(sorted(fingerprints))}) and do not "
            "compare; run them again on one, or force it"
        )
    _check_batches(series)
    rungs, paced = Ladder(plan, series), pace.read_pace(plan, out)
    rows = _judged(plan, _rows(plan, series, rows_begun, out, rungs, owed), owed)
    shown = [row.to_json() for row in rows]
    laddered = rungs.to_json(out, choose_rates(plan, out))
    results = Results(
        format=FORMAT,
        plan=plan.to_json(),
        digest=plan.digest,
        fingerprints=sorted(fingerprints),
        command=command,
        machine=_made_on(series),
        rows=shown,
        runs=[
            {
                "folder": run.folder.relative_to(out).as_posix(),
                "label": each.label,
                **run.result,
                "hardware": list(run.hardware),
                "gradient_norm": None if run.updates is None else _finite(run.updates["gradient_norm"]),
                "deep_max_weight": (run.routing or {}).get("deep_third", {}).get("max_weight"),
            }
            for each in series
            for run in each.seeds
        ],
        tuning=[
            {
                "label": run.variant.label,
                "lr": run.config.lr,
                "residual_lr": run.config.residual_rate,
                "seed": run.config.seed,
                "loss": _finite(final_loss(out / run.folder)),
                "gradient_norm": _finite(read_updates(out / run.folder)["gradient_norm"]),
            }
            for run in trials(plan, out)
            if has_ended(out / run.folder)
        ],
        diverged=[*untuned, *failed],
        notes=[
            *([] if left is None else [unfinished.note(plan, left)]),
            *notes.of_the_table(plan, rows, len(fingerprints), paced=paced is not None),
            *notes.smaller_rates(plan, out),
            *ladder.notes(laddered),
            *pace.note(paced),
            *([] if plan.until is None else [plan.until.note(len(plan.seeds), widest_half(shown))]),
            *notes.repeated_text(series),
            *notes.breaks(plan, lost, untuned, failed),
        ],
        statistics=_statistics(plan, rows, owed),
        **({} if laddered is None else {"ladder": laddered}),
        **({} if paced is None else {"pace": paced}),
        **({} if left is None else {"unfinished": left}),
    )
    results.series = read
    return results


def _finite(value: float | None) -> float | None:
    """None for what a run that diverged has none of: JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _made_on(series: Sequence[Series]) -> dict[str, str]:
    """System and versions that the runs were made with, each once; of this machine, where the runs do not say."""
    manifests = [run.manifest for each in series for run in each.seeds if run.manifest]
    told = [{"system": manifest.get("machine"), **manifest.get("versions", {})} for manifest in manifests]
    here = {"system": f"{platform.system()} {platform.machine()}", **versions()}
    if not told:
        return here
    return {key: ", ".join(dict.fromkeys(str(each[key]) for each in told if each.get(key))) for key in here}


def _broken(out: Path, runs: Sequence[Run]) -> list[Broken]:
    """What is known of every one of these runs that diverged."""
    return [
        {"folder": run.folder, "label": run.variant.label, "lr": run.config.lr, **why}
        for run in runs
        if (why := divergence(out / run.folder)) is not None
    ]


def _check_batches(series: Iterable[Series]) -> None:
    """Refuse runs of one size and seed that did not see the same batches in the same order: each update logged what it
    saw. Sizes may train on more or less text, and runs on different corpora are compared only where that is forced."""
    first: dict[tuple[str, int, str], FinishedRun] = {}
    for size, run in ((each.baseline, run) for each in series for run in each.seeds):
        other = first.setdefault((size, run.seed, run.result["fingerprint"]), run)
        if _seen(run) != _seen(other):
            raise ValueError(f"{run.folder} and {other.folder} have one seed but saw different batches; run both again")


def _seen(run: FinishedRun) -> tuple[object, ...]:
    """The batches of a run, and how many lines they come from: runs of one recipe log alike."""
    return () if run.updates is None else (run.updates["lines"], run.updates["batches"])


def _statistics(plan: ComparePlan, rows: Sequence[Row], owed: int) -> Values:
    """How verdicts are made, for the legend and whoever reads the JSON."""
    compared = [row for row in rows if row.difference is not None]
    judged = [row for row in compared if row.adjusted is not None] or compared
    looks = 1 if plan.until is None else len(plan.until.counts(len(plan.seeds)))
    return {
        "alpha": ALPHA,
        "rows": len(judged) + owed,
        "mde_rows": len(judged) + owed,
        "over_rows": "Holm",
        "looks": looks,
    }


def _judged(plan: ComparePlan, rows: Sequence[Row], owed: int) -> list[Row]:
    """The rows with their p-values corrected for being many, and for the looks that the plan may take.

    owed: rows that are not there yet. They count as if their p-values were 1, the most that they can be.
    """
    looks = 1 if plan.until is None else len(plan.until.counts(len(plan.seeds)))
    tested = [row for row in rows if row.difference is not None and row.difference.p is not None]
    known = [row.difference.p for row in tested if row.difference and row.difference.p is not None]
    adjusted = holm([*known, *[1.0] * owed])[: len(known)]
    found = {row.label: min(1.0, looks * p) for row, p in zip(tested, adjusted, strict=True)}
    return [replace(row, adjusted=found.get(row.label)) for row in rows]


def _of_updates(each: Series, key: str) -> list[float]:
    """A number of the updates of every seed; none where one does not say."""
    found = [run.updates[key] for run in each.seeds if run.updates is not None and run.updates[key] is not None]
    return found if len(found) == len(each.seeds) else []


def _rows(
    plan: ComparePlan, series: Sequence[Series], begun: Mapping[str, Run], out: Path, rungs: Ladder, owed: int
) -> list[Row]:
    by_slug = {each.slug: each for each in series}
    budgets: dict[str, float] = {}
    for each in series:
        budgets[each.baseline] = min(budgets.get(each.baseline, math.inf), fmean(run.seconds for run in each.seeds))
    alike = len({run.clock for each in series for run in each.seeds}) == 1

    def every(each: Series, key: str) -> list[float]:
        return [run.result[key] for run in each.seeds]

    def of_base(each: Series) -> list[float]:
        """The losses of its baseline on its seeds."""
        losses = {run.seed: run.result["loss"] for run in by_slug[each.baseline].seeds}
        return [losses[run.seed] for run in each.seeds]

    level = ALPHA if plan.until is None else plan.until.level(len(plan.seeds))
    tests = owed + sum(each.slug != each.baseline and len(each.seeds) >= FEWEST for each in series)
    tried = trials(plan, out)
    rows = []
    for each in series:
        first, base = begun[each.label], by_slug[each.baseline]
        variant, config, result = first.variant, first.config, each.seeds[0].result
        tuned = plan.tuned_as(variant)
        grid = plan.rates(tuned)
        stable = widest_stable(plan, out, variant)
        chosen = {"lr": config.lr, "residual_lr": config.residual_rate}
        rows.append(
            Row(
                label=each.label,
                design=config.design,
                layout=variant.layout,
                size=str(variant.size),
                baseline=each is base,
                parameters=result["parameters"],
                stream_parameters=result["stream_parameters"],
                mlp_width=config.model(256).hidden,
                rates=chosen,
                trials=sum(run.variant == tuned for run in tried),
                edge=any(_at_edge(plan, key, begun[tuned.label]) for rates in grid[:1] for key in rates),
                loss=spread(every(each, "loss")),
                perplexity=spread(every(each, "perplexity")),
                bits_per_byte=spread(every(each, "bits_per_byte")),
                difference=None if each is base else paired(every(each, "loss"), of_base(each), level, tests),
                loss_at_equal_time=spread([run.loss_at(budgets[each.baseline]) for run in each.seeds])
                if alike
                else None,
                **each.over(base),
                hardware="; ".join(each.hardware),
                build="; ".join(each.builds),
                gradient_norm=max(_of_updates(each, "gradient_norm"), default=None),
                spikes=int(sum(_of_updates(each, "spikes"))),
                stable_rate=None if stable is None else {"lr": stable[0], "open": stable[1]},
                adjusted=None,
                speedup=None if each is base else rungs.speedup(each, str(variant.size)),
                routing=each.routing_means(),
            )
        )
    return rows


def _at_edge(plan: ComparePlan, key: str, tuned: Run) -> bool:
    """Whether the row that was tuned took the smallest or the largest rate of its grid."""
    grid = {rates[key] for rates in plan.rates(tuned.variant)}
    rate = tuned.config.lr if key == "lr" else tuned.config.residual_rate
    return len(grid) > 1 and rate in (min(grid), max(grid))
