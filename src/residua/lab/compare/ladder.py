"""A ladder: the baseline's loss over the sizes of a plan, and what every row is worth in the baseline's compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Values
from residua.lab.compare.choice import check_rule
from residua.lab.compare.plan import ComparePlan
from residua.lab.compare.sizes import counted_parameters
from residua.lab.compare.speedup import AXES, FEWEST_RUNGS, FEWEST_SEEDS, Fitted, Rung
from residua.lab.runs import FinishedRun, Series, rounded
from residua.model import ModelConfig, measure

SPAN = 4.0
"""How many times the compute of the smallest size the largest must have for a curve over them to mean anything."""


class Ladder:
    """The sizes of a plan as rungs, and the curves through the baseline's losses there."""

    def __init__(self, plan: ComparePlan, series: Sequence[Series]) -> None:
        self.plan = plan
        by_slug = {each.slug: each for each in series}
        self.bases = {
            str(variant.size): by_slug[variant.slug]
            for variant in plan.variants()
            if plan.baseline_of(variant) == variant and variant.slug in by_slug
        }
        alike = len({run.clock for each in series for run in each.seeds}) == 1
        self.fitted: dict[str, Fitted] = {}
        for axis in AXES:
            costs = {size: _costs(each.seeds, axis) for size, each in self.bases.items()}
            means = {size: fmean(each) for size, each in costs.items() if len(each) >= FEWEST_SEEDS}
            # seconds of two clocks are two units
            if len(means) < FEWEST_RUNGS or (axis == "per_cpu_second" and not alike):
                continue
            if max(means.values()) >= SPAN * min(means.values()):
                self.fitted[axis] = Fitted(
                    [
                        Rung(size, mean, [run.result["loss"] for run in self.bases[size].seeds])
                        for size, mean in means.items()
                    ]
                )

    def speedup(self, each: Series, size: str) -> Values | None:
        """Of a row at its size, per token and per processor second; None where there is no ladder."""
        if not self.fitted:
            return None
        base = {run.seed: run.result["loss"] for run in self.bases[size].seeds}
        gaps = [run.result["loss"] - base[run.seed] for run in each.seeds]
        found: Values = {}
        for axis in AXES:
            fitted = self.fitted.get(axis)
            sizes = [] if fitted is None else [rung.size for rung in fitted.rungs]
            if fitted is None or size not in sizes or len(gaps) < FEWEST_SEEDS:
                found[axis] = None
                continue
            place = sizes.index(size)
            spent = fitted.rungs[place].compute if axis == "per_token" else fmean(run.seconds for run in each.seeds)
            found[axis] = fitted.speedup(place, gaps, spent)
        return found

    def to_json(self, out: Path, tuned: Mapping[str, Mapping[str, float]]) -> Values | None:
        """The rule and its check, the rungs and the curves; None for a plan that has neither."""
        plan = self.plan
        if plan.tune.carry == "none" and not self.fitted:
            return None
        return {
            "rule": plan.tune.carry,
            "stated": plan.tune.describe(),
            "tuned_at": str(plan.sizes[0]),
            "check": check_rule(plan, out, tuned),
            "rungs": [_rung(size, each) for size, each in self.bases.items()],
            "curves": {axis: fitted.to_json() for axis, fitted in self.fitted.items()},
        }


def notes(found: Values | None) -> list[str]:
    """What a reader must know of the rates and of the speedups."""
    if found is None:
        return []
    said = []
    if found["stated"]:
        said.append(f"Rates were tuned at {found['tuned_at']} and carried to the other sizes by {found['stated']}.")
    for row in found["check"]:
        if row["holds"]:
            said.append(f"{row['label']}: of three rates around the predicted {row['predicted']:g} it is the best.")
        else:
            lost = "it diverged" if row["lost"] is None else f"that costs {row['lost']:.4f} nats"
            said.append(
                f"{row['label']}: the rule predicts the rate {row['predicted']:g} and {row['best']:g} is better on the "
                f"tuning seeds; {lost}."
            )
    if found["curves"]:
        said.append(
            "speedup: the baseline's compute at the row's loss over the row's own, from L = L_inf + A C^-alpha through "
            "the baseline's sizes, with a 95 % bootstrap interval; n.s. where it holds 1, * beyond the largest size."
        )
    return said


def _costs(runs: Sequence[FinishedRun], axis: str) -> list[float]:
    """The compute of every run in the unit of an axis; none where a run does not say."""
    if axis == "per_cpu_second":
        found = [run.seconds for run in runs]
        return found if all(found) else []
    return [cost for run in runs if (cost := _operations(run)) is not None]


def _operations(run: FinishedRun) -> float | None:
    """Of all updates of a run: three forward passes' worth, the head included."""
    vocab = ((run.manifest or {}).get("data", {}).get("tokenizer") or {}).get("vocab")
    if run.settings is None or vocab is None:
        return None
    config = run.config
    return 3 * _forward(config.model(vocab), config.context) * run.result["tokens"]


@lru_cache(maxsize=256)
def _forward(model: ModelConfig, context: int) -> float:
    return measure(model, tokens=context).flops_per_token


def _rung(size: str, each: Series) -> Values:
    config = each.seeds[0].config
    losses = [run.result["loss"] for run in each.seeds]
    operations = _operations(each.seeds[0])
    return {
        "size": size,
        "parameters": counted_parameters(config),
        "tokens": each.seeds[0].result["tokens"],
        "compute": None if operations is None else rounded(operations),
        "cpu_seconds": rounded(fmean(run.seconds for run in each.seeds)),
        "lr": config.lr,
        "loss": rounded(fmean(losses)),
        "seeds": len(losses),
    }
