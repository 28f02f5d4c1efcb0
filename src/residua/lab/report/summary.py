"""summary(...): the table at the top of the page, best first, its noise stated and its cost beside its quality.

For a finished comparison these are the cells of `residua compare`, to the letter. For anything else they are what the
finished seeds say, without a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import times
from residua.lab.compare.table import columns, legend
from residua.lab.runs import Series, read_if_there, rounded

COST = ("params", "speed", "memory", "equal time")
ROUTING = ("max w", "entropy", "eff n", "collapsed")


def summary(comparison: Path | None, shown: Sequence[Series], drawn: Record) -> Values:
    """Columns, rows, differences, a legend, and notes."""
    results = _results(comparison, shown)
    if results is None:
        return _unjudged(shown, drawn)
    cells = columns(results)
    first = ("val loss", "vs baseline", "bits/byte", "perplexity", "lr")
    known = {"design", *first, *COST, *ROUTING}
    groups = [
        (title, [name for name in names if name in cells])
        for title, names in (("quality", first), ("cost", COST), ("routing", ROUTING))
    ]
    # a column that `residua compare` gains is shown before this file knows of it
    groups.append(("more", [name for name in cells if name not in known]))
    places = {each.label: place for place, each in enumerate(shown)}
    rows = sorted(results["rows"], key=lambda row: row["loss"]["mean"])
    return {
        "groups": [{"title": title, "columns": names} for title, names in groups if names],
        "rows": [
            {"series": places[row["label"]], "cells": [cells[name](row) for _, names in groups for name in names]}
            for row in rows
        ],
        "differences": [
            {"series": places[row["label"]]}
            | {key: row["difference"][key] for key in ("mean", "low", "high", "detectable", "significant")}
            for row in rows
            if row["difference"] is not None
        ],
        "legend": legend(results).split("\n"),
        "notes": list(results["notes"]),
    }


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
        return {"series": place, "cells": cells}

    losses = [rounded(fmean(seed.result["loss"] for seed in each.seeds)) for each in shown]
    return {
        "groups": [
            {"title": "quality", "columns": ["val loss", "bits/byte", "seeds"]},
            {"title": "cost", "columns": ["params", "speed", "memory"]},
        ],
        "rows": [row(place) for place in sorted(range(len(shown)), key=losses.__getitem__)],
        "differences": [],
        "legend": [
            "val loss: nats per token, mean over the finished seeds; in brackets the lowest and highest seed.",
            "speed: tokens per CPU second, and peak memory, over those of the first.",
        ],
        "notes": ["Not a finished comparison: differences are not judged, and may be noise."] if len(shown) > 1 else [],
    }
