"""The answer of a comparison: a row per design with its spread, its difference from the baseline, and its cost."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from residua.lab.common.files import read_json
from residua.lab.common.stats import Difference, Spread, paired, spread
from residua.lab.compare.outcome import RESULT, ROUTING, divergence, final_loss
from residua.lab.compare.plan import ComparePlan, Run, Variant
from residua.lab.train import read_metrics

FORMAT = 1
Broken = Mapping[str, Any]
"""A run that diverged: its folder, row and rate, and the step, site and message of the break."""
ROUTED = ("max_weight", "normalised_entropy", "effective_sources", "collapsed_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One design in one layout at one size."""

    label: str
    design: str
    layout: str
    size: str
    baseline: bool
    parameters: int
    stream_parameters: int
    mlp_width: int
    rates: Mapping[str, float]
    trials: int
    """Tuning runs that chose the rates."""
    edge: bool
    """The chosen rate is the smallest or largest of its grid: a better one may lie outside."""
    loss: Spread
    perplexity: Spread
    bits_per_byte: Spread
    difference: Difference | None
    """Of the validation loss from the baseline's; None for the baseline itself."""
    loss_at_equal_time: Spread
    speed: float
    """Tokens per processor second, over the baseline's."""
    memory: float
    """Peak memory over the baseline's."""
    routing: Mapping[str, float | None]
    """Means over seeds and sites; `deep_` those of the last third of the network."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict that the interval gives."""
        values = asdict(self)
        if self.difference is not None:
            values["difference"]["significant"] = self.difference.significant
        return values


def choose_rates(plan: ComparePlan, out: Path) -> dict[str, dict[str, float]]:
    """For every row the rates with the lowest mean validation loss over the tuning seeds; ties to the smaller.

    A rate that diverged on any of them is none to choose; a row with no other has no entry.
    """
    losses: dict[str, dict[tuple[tuple[str, float], ...], list[float]]] = {}
    for run in plan.tuning():
        rates = tuple((key, getattr(run.config, key)) for key in plan.rates(run.variant)[0])
        losses.setdefault(run.variant.label, {}).setdefault(rates, []).append(final_loss(out / run.folder))
    chosen = {}
    for label, tried in losses.items():
        means = [(fmean(found), rates) for rates, found in tried.items() if max(found) < math.inf]
        if means:
            chosen[label] = dict(min(means)[1])
    return chosen


def reported(plan: ComparePlan, out: Path) -> list[Run]:
    """The runs of the table at the rates chosen for their rows; none of a row whose every rate diverged."""
    rates = choose_rates(plan, out)
    for variant in plan.variants():
        if plan.tune.lr and variant.label not in rates and plan.baseline_of(variant) == variant:
            raise ValueError(
                f"every rate of the baseline {variant.label} diverged, and nothing can be compared with it; give "
                "smaller ones and another --out"
            )
    return [run for run in plan.runs(rates) if run.variant.label in rates or not plan.tune.lr]


def collect(plan: ComparePlan, out: Path, *, force: bool = False, command: str = "") -> dict[str, Any]:
    """Everything the tables, files and figures are made from. Every run must be there and of one corpus.

    A row of which a reported run diverged is left out whole, and a note says so: the mean of the seeds that it
    survived would flatter it.
    """
    begun = reported(plan, out)
    untuned, failed = _broken(out, plan.tuning()), _broken(out, begun)
    runs = [run for run in begun if all(run.variant.label != one["label"] for one in failed)]
    results = {run.folder: read_json(out / run.folder / RESULT) for run in runs}
    fingerprints = {result["fingerprint"] for result in results.values()}
    if len(fingerprints) > 1 and not force:
        raise ValueError(
            f"these runs saw {len(fingerprints)} corpora or tokenizers ({', '.join(sorted(fingerprints))}) and do not "
            "compare; run them again on one, or force it"
        )
    _check_batches(out, runs)
    rows = _rows(plan, out, runs, results)
    return {
        "format": FORMAT,
        "plan": plan.to_json(),
        "digest": plan.digest,
        "fingerprints": sorted(fingerprints),
        "command": command,
        "machine": _machine(),
        "rows": [row.to_json() for row in rows],
        "runs": [{"folder": run.folder, "label": run.variant.label, **results[run.folder]} for run in runs],
        "diverged": [*untuned, *failed],
        "notes": [*notes(plan, rows, len(fingerprints)), *_breaks(plan, rows, untuned, failed)],
    }


def _broken(out: Path, runs: Sequence[Run]) -> list[Broken]:
    """What is known of every one of these runs that diverged."""
    return [
        {"folder": run.folder, "label": run.variant.label, "lr": run.config.lr, **why}
        for run in runs
        if (why := divergence(out / run.folder)) is not None
    ]


def _check_batches(out: Path, runs: Sequence[Run]) -> None:
    """Refuse runs of one seed that did not see the same batches in the same order: each update logged what it saw."""
    seen: dict[int, tuple[str, list[Any]]] = {}
    for run in runs:
        lines = read_metrics(out / run.folder / "metrics.jsonl")
        batches = [line["batch"] for line in lines if line["kind"] == "train"]
        folder, first = seen.setdefault(run.config.seed, (run.folder, batches))
        if batches != first:
            raise ValueError(f"{run.folder} and {folder} have one seed but saw different batches; run both again")


def _rows(
    plan: ComparePlan,
    out: Path,
    runs: Sequence[Run],
    results: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    by_row: dict[str, list[Run]] = {}
    for run in runs:
        by_row.setdefault(run.variant.label, []).append(run)

    def every(variant: Variant, *keys: str) -> list[float]:
        found = []
        for run in by_row[variant.label]:
            value: Any = results[run.folder]
            for key in keys:
                value = value[key]
            found.append(value)
        return found

    def speed(variant: Variant) -> float:
        tokens, seconds = every(variant, "tokens"), every(variant, "time", "cpu_seconds")
        return fmean(seen / spent for seen, spent in zip(tokens, seconds, strict=True))

    variants = [variant for variant in plan.variants() if variant.label in by_row]
    budget = min(fmean(every(variant, "time", "cpu_seconds")) for variant in variants)
    rows = []
    for variant in variants:
        first, base = by_row[variant.label][0], plan.baseline_of(variant)
        own, grid = base == variant, plan.rates(variant)
        losses = every(variant, "loss")
        chosen = {"lr": first.config.lr, "residual_lr": first.config.residual_rate}
        rows.append(
            Row(
                label=variant.label,
                design=first.config.design,
                layout=variant.layout,
                size=str(variant.size),
                baseline=own,
                parameters=results[first.folder]["parameters"],
                stream_parameters=results[first.folder]["stream_parameters"],
                mlp_width=first.config.model(256).hidden,
                rates=chosen,
                trials=len(grid) * len(plan.tune.seeds),
                edge=any(_at_edge(plan, key, chosen[key]) for rates in grid[:1] for key in rates),
                loss=spread(losses),
                perplexity=spread(every(variant, "perplexity")),
                bits_per_byte=spread(every(variant, "bits_per_byte")),
                difference=None if own else paired(losses, every(base, "loss")),
                loss_at_equal_time=spread(
                    [loss_at(out / run.folder / "metrics.jsonl", budget) for run in by_row[variant.label]]
                ),
                speed=speed(variant) / speed(base),
                memory=fmean(every(variant, "time", "peak_memory")) / fmean(every(base, "time", "peak_memory")),
                routing=_routing([read_json(out / run.folder / ROUTING) for run in by_row[variant.label]]),
            )
        )
    return rows


def loss_at(metrics: Path, seconds: float) -> float:
    """The validation loss when a run had used so many processor seconds, on a line between validations."""
    points = [(line["time"]["cpu_seconds"], line["loss"]) for line in read_metrics(metrics) if line["kind"] == "valid"]
    if not points:
        raise ValueError(f"{metrics} holds no validation")
    before = points[0]
    for point in points:
        if point[0] >= seconds:
            share = 0.0 if point[0] == before[0] else (seconds - before[0]) / (point[0] - before[0])
            return before[1] + max(0.0, share) * (point[1] - before[1])
        before = point
    return points[-1][1]


def notes(plan: ComparePlan, rows: Sequence[Row], corpora: int) -> list[str]:
    """What a reader must know before believing the table."""
    said = []
    if len(plan.seeds) < 3:
        said.append(f"{len(plan.seeds)} seed(s): no interval is given below three, and no difference is judged.")
    base = next(row for row in rows if row.baseline)
    if not plan.tune.lr:
        said.append(
            "One learning rate for all, not tuned: a design that likes another rate is misjudged. --lr-grid tunes each."
        )
    said += [
        f"{row.label}: its rate {row.rates['lr']:g} is at the edge of the grid; a better one may lie outside."
        for row in rows
        if row.edge
    ]
    said += [
        f"{row.label} was tuned by {row.trials} runs and the baseline {base.label} by {base.trials}."
        for row in rows
        if row.trials > base.trials
    ]
    if corpora > 1:
        said.append("FORCED: these runs saw different corpora or tokenizers; their losses do not compare.")
    return said


def _breaks(plan: ComparePlan, rows: Sequence[Row], untuned: Sequence[Broken], failed: Sequence[Broken]) -> list[str]:
    """A sentence for every row that runs broke in: rates that are none to choose, or why it has no line."""
    said, shown = [], {row.label for row in rows}
    for label in (variant.label for variant in plan.variants()):
        rates, seeds = ([one for one in broken if one["label"] == label] for broken in (untuned, failed))
        if label not in shown:
            last = (seeds or rates)[-1]
            which = last["folder"].rpartition("/")[2] if seeds else "every rate"
            said.append(f"{label} is LEFT OUT: {which} diverged ({last['folder']}, {last['message']}).")
        elif rates:
            tried = ", ".join(f"{rate:g}" for rate in dict.fromkeys(one["lr"] for one in rates))
            said.append(f"{label}: diverged while tuning at lr {tried}.")
    return said


def _at_edge(plan: ComparePlan, key: str, rate: float) -> bool:
    grid = getattr(plan.tune, key)
    return len(grid) > 1 and rate in (min(grid), max(grid))


def _routing(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for prefix, part in (("", "network"), ("deep_", "deep_third")):
        for key in ROUTED:
            values = [record[part][key] for record in records]
            known = [value for value in values if value is not None and math.isfinite(value)]
            found[prefix + key] = fmean(known) if len(known) == len(values) and known else None
    return found


def _machine() -> dict[str, str]:
    import torch

    from residua import __version__

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "residua": __version__,
    }
