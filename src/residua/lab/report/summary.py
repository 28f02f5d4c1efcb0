"""summary(...): the table at the top of the page: what differs apart from what does not, and cost beside quality.

For a finished comparison these are the cells of `residua compare`, but for the difference from the baseline, which is
in words. For anything else they are what the finished seeds say, without a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import times
from residua.lab.compare.table import columns, legend
from residua.lab.compare.verdict import in_words, verdict
from residua.lab.runs import Series, read_if_there, rounded

AGAINST = "against the baseline"
MAIN = {
    "quality": ("val loss", AGAINST, "lr"),
    "cost": ("params", "speed", "memory"),
    "routing, all sites / last third": ("max w", "entropy", "eff n", "collapsed"),
}
"""The columns that a reader sees at once; the others are folded away, so that the table fits."""
PLAIN = {"max w": "largest share", "eff n": "effective sources", "lr": "learning rate", "params": "parameters"}
BETTER, UNCLEAR, WORSE = (
    "significantly better than the baseline",
    "not significantly different from the baseline",
    "significantly worse than the baseline",
)
ORDER = (BETTER, UNCLEAR, WORSE)


def summary(comparison: Path | None, shown: Sequence[Series], drawn: Record) -> Values:
    """Rows in groups, the columns of the table and those that are folded away, differences, a legend, and notes."""
    results = _results(comparison, shown)
    if results is None or comparison is None:
        return _unjudged(shown, drawn)
    cells = columns(results) | {AGAINST: lambda row: in_words(row["difference"])}
    known = {"design", "vs baseline", *(name for names in MAIN.values() for name in names)}
    groups = {title: [name for name in names if name in cells] for title, names in MAIN.items()}
    # a column that `residua compare` gains is shown before this file knows of it
    folded = [name for name in cells if name not in known]
    places = {each.label: place for place, each in enumerate(shown)}
    sizes = list(dict.fromkeys(row["size"] for row in results["rows"]))  # losses of two sizes are no contest
    rows = sorted(
        results["rows"], key=lambda row: (ORDER.index(_group(row)), sizes.index(row["size"]), row["loss"]["mean"])
    )
    return {
        "groups": [
            {"title": title, "columns": [PLAIN.get(name, name) for name in names]}
            for title, names in groups.items() if names
        ],
        "rows": [
            {"series": places[row["label"]], "group": _group(row),
             "cells": [cells[name](row) for names in groups.values() for name in names],
             "folded": [cells[name](row) for name in folded]}
            for row in rows
        ],
        "sections": list(dict.fromkeys(_group(row) for row in rows)),
        "folded": folded,
        "differences": [
            {"series": places[row["label"]], "words": in_words(row["difference"])}
            | {key: row["difference"][key] for key in ("mean", "low", "high", "detectable", "significant")}
            for row in rows
            if row["difference"] is not None
        ],
        "verdict": verdict(results, comparison.name if comparison.is_absolute() else comparison),
        "ladder": ladder(results, places),
        "legend": legend(results).split("\n"),
        "notes": list(results["notes"]),
    }  # fmt: skip


def ladder(results: Record, places: Mapping[str, int]) -> Values | None:
    """The sizes of the baseline, the curves through them and the speedups of the rows; None without a ladder."""
    found = results.get("ladder")
    if not found or not found["curves"]:
        return None
    compute = {rung["size"]: rung["compute"] for rung in found["rungs"]}
    return {
        "rungs": found["rungs"],
        "curves": found["curves"],
        "rows": [
            {"series": places[row["label"]], "loss": row["loss"]["mean"], "compute": compute.get(row["size"]),
             "speedup": row["speedup"]}
            for row in results["rows"]
            if row.get("speedup") is not None
        ],
    }  # fmt: skip


def _group(row: Record) -> str:
    """Where a row stands: a baseline among those that cannot be told from it."""
    gap = row["difference"]
    if gap is None or not gap["significant"]:
        return UNCLEAR
    return BETTER if gap["mean"] < 0 else WORSE


def _results(comparison: Path | None, shown: Sequence[Series]) -> Record | None:
    """The results of a comparison, if they are those of the runs that lie there now."""
    if comparison is None or (results := read_if_there(comparison / "results.json")) is None:
        return None
    told = {str(comparison / run["folder"]): run["loss"] for run in results["runs"]}
    there = {str(seed.folder): seed.result["loss"] for each in shown for seed in each.seeds}
    return results if told == there else None


def _unjudged(shown: Sequence[Series], drawn: Record) -> Values:
    """What the finished seeds say: means and ranges, no interval and no verdict."""

    def row(place: int) -> Values:
        quality, bits = drawn["quality"][shown[place].slug], drawn["quality"][shown[place].slug]["bits_per_byte"]
        spread = f" ({bits['low']:.4f} to {bits['high']:.4f})" if len(shown[place].seeds) > 1 else ""
        cells = [f"{losses[place]:.4f}", f"{bits['mean']:.4f}{spread}", f"{len(shown[place].seeds)}"]
        cells += [f"{quality['parameters']:,}", times(quality["speed"]), times(quality["memory"])]
        return {"series": place, "group": "", "cells": cells, "folded": []}

    losses = [rounded(fmean(seed.result["loss"] for seed in each.seeds)) for each in shown]
    return {
        "groups": [
            {"title": "quality", "columns": ["val loss", "bits/byte", "seeds"]},
            {"title": "cost", "columns": ["parameters", "speed", "memory"]},
        ],
        "rows": [row(place) for place in sorted(range(len(shown)), key=losses.__getitem__)],
        "sections": [""],
        "folded": [],
        "differences": [],
        "verdict": None,
        "ladder": None,
        "legend": [
            "val loss: nats per token, mean over the finished seeds; in brackets the lowest and highest seed.",
            "speed: tokens per CPU second, and peak memory, over those of the first.",
        ],
        "notes": ["Not a finished comparison: differences are not judged, and may be noise."] if len(shown) > 1 else [],
    }
