"""read_series(...): the runs of a comparison, or of directories of `residua train`, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from residua.lab.common.files import read_json
from residua.lab.compare.pace import read_pace, seconds_of
from residua.lab.compare.plan import PLAN, ComparePlan, slug_of
from residua.lab.runs import RESULT, Series, divergence, is_done, read_if_there, read_recipe, read_run
from residua.lab.train import TrainConfig
from residua.lab.train.recipe import Recipe

LOOKS = "looks.json"
"""Of a comparison that adds seeds: how many its rows have."""


def read_series(*outs: Path | str) -> list[Series]:
    """The series of a comparison, or of one or several runs; at least one has a finished seed."""
    folders = [Path(out) for out in outs]
    if len(folders) == 1 and (folders[0] / PLAN).exists():
        values = read_json(folders[0] / PLAN)
        if "finetune" in values:
            raise ValueError(f"{folders[0]} compares conversions; give the directories of its runs, as runs/ROW/seed0")
        planned = of_comparison(_grown(ComparePlan.from_json(values), folders[0]), folders[0])
    else:
        planned = _alone(folders)
    if not any(each.seeds for each in planned):
        named = ", ".join(map(str, folders))
        raise ValueError(f"{named} holds no finished run; run the same command again to finish it")
    return planned


def _grown(plan: ComparePlan, out: Path) -> ComparePlan:
    """The plan at the last look that was taken in `out`."""
    taken = (read_if_there(out / LOOKS) or {"seeds": len(plan.seeds)})["seeds"]
    return next(look for look in plan.looks() if len(look.seeds) == taken)


def of_comparison(plan: ComparePlan, out: Path) -> list[Series]:
    """A series for every row of a plan, with the seeds that are finished; none of a row of which one diverged."""
    folders: dict[str, list[tuple[Path, TrainConfig]]] = {}
    chosen = ("lr", "residual_lr") if plan.tune.lr else ()
    for run in plan.runs({}):  # the rates decide nothing about where a run lies
        folders.setdefault(run.variant.slug, []).append((out / run.folder, run.config))
    paced = seconds_of(read_pace(plan, out))
    found = []
    for variant in plan.variants():
        runs = folders[variant.slug]
        # the seeds that a diverging design survives would flatter it
        broken = any(divergence(folder) for folder, _ in runs)
        seeds = (
            []
            if broken
            else [
                replace(read_run(folder, config.seed, config, chosen), update_seconds=paced.get(variant.slug))
                for folder, config in runs
                if is_done(folder)
            ]
        )
        found.append(Series(variant.label, variant.slug, plan.baseline_of(variant).slug, len(runs), seeds))
    return found


def _design(folder: Path, config: Recipe) -> str:
    """What a run is called: a fine-tuned checkpoint may have brought its design along."""
    named: str | None = getattr(config, "design", None)
    return named or str((read_if_there(folder / RESULT) or {}).get("design", "base"))


def _alone(folders: Sequence[Path]) -> list[Series]:
    """Runs that no plan ties together: those whose configs differ by the seed alone are one series."""
    groups: dict[str, list[tuple[Path, Recipe]]] = {}
    for folder in folders:
        if (folder / PLAN).exists():
            raise ValueError(f"{folder} is a comparison; give it alone, or give directories of runs")
        if not (folder / "config.json").exists():
            raise ValueError(
                f"{folder} is the directory of neither a comparison nor a run: it has no {PLAN} and no config.json"
            )
        config = read_recipe(read_json(folder / "config.json"))
        groups.setdefault(replace(config, seed=0).digest, []).append((folder, config))
    designs = [_design(*members[0]) for members in groups.values()]
    labels = [
        design if designs.count(design) == 1 else f"{design} | {members[0][0].name}"
        for design, members in zip(designs, groups.values(), strict=True)
    ]
    slugs = [slug_of(label) for label in labels]
    slugs = [slug if slugs.count(slug) == 1 else f"{slug}-{place}" for place, slug in enumerate(slugs)]
    return [
        Series(
            label,
            slug,
            slugs[0],
            len(members),
            [read_run(folder, config.seed) for folder, config in members if (folder / RESULT).exists()],
        )
        for label, slug, members in zip(labels, slugs, groups.values(), strict=True)
    ]
