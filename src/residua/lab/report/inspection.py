"""inspection(found): the page data of one model and one prompt, in the form of a comparison of one.

What is given, ready for JSON:

    model      its name or path                     design    its spec
    prompt     the text                             tokens    the text of every token
    record     `RoutingRecord.summary()`            weights   site -> [lane][source][token][group]
    attention  site -> mean weight 0, 1, 2, ... tokens back; may be left out
    loss       of the prompt, nats per token; may be left out
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from residua.lab import figures
from residua.lab.common.files import Record, Values
from residua.lab.plots.colour import DIVERGING, SEQUENTIAL
from residua.lab.report import explorer as explorers
from residua.lab.report.data import FORMAT, PAPER, PROMPTED, axes_of, depth_of
from residua.lab.report.look import Look
from residua.lab.report.text import visible, visible_piece, visible_tree
from residua.lab.runs import FinishedRun, Series

SLUG = "model"


def inspection(found: Record) -> Values:
    """Everything the page shows of one model and prompt."""
    needed = [key for key in ("model", "design", "prompt", "tokens", "record", "weights") if key not in found]
    if needed:
        raise ValueError(f"an inspection needs {', '.join(needed)} to be drawn")
    weights = {site: torch.tensor(_defined(values)) for site, values in found["weights"].items()}
    means = {site: each.mean((0, 2, 3)).tolist() for site, each in weights.items()}
    record = {**found["record"], "mean_weights": means}
    looked = Look(record, weights, dict(found.get("attention") or {}))
    series = Series(found["design"], SLUG, SLUG, 1, [FinishedRun(folder=Path(), seed=0, result={}, routing=record)])
    drawn = figures.of_records({SLUG: series})
    route = None
    notes = []
    if SLUG in drawn["routing"]:
        tokens = [visible_piece(text) or "<special>" for text in found["tokens"]]
        route = explorers.explorer(drawn["routing"][SLUG], [(0, record, looked)], tokens, PROMPTED)
        notes = explorers.bound({SLUG: route}) + explorers.pack({SLUG: route}, {SLUG: [looked]})
    data: Values = {
        "format": FORMAT,
        "title": visible(found["model"]),
        "kind": "inspection",
        "notes": notes,
        "band": figures.BAND,
        "colours": {"sequential": SEQUENTIAL, "diverging": DIVERGING},
        "series": [{"label": visible(found["design"]), "colour": "black", "dash": 0, "seeds": [0], "baseline": True}],
        "summary": None,
        "curves": [],
        "quality": [None],
        "depth": [depth_of(drawn, SLUG, [looked])],
        "paper": PAPER,
        "beta": [drawn["beta"].get(SLUG)],
        "routing": [route],
        "prompt": found["prompt"],
        "loss": found.get("loss"),
        "axes": [axes_of(route, drawn["routing"].get(SLUG), [looked])],
        "costs": [None],
        "runs": None,
    }
    data["absent"] = (
        {} if route else {"routing": f"{visible(found['design'])} mixes no sources.", "tokens": "No weights."}
    )
    if not any(data["axes"][0].values()):
        data["absent"]["axes"] = "It reads no sources by age, and its attention was not recorded."
    checked: Any = visible_tree(data)
    if route:
        checked["routing"][0]["packed"] = route["packed"]
    return checked


def _defined(values: Any) -> Any:
    """JSON writes None for what is not a number."""
    if isinstance(values, list):
        return [_defined(each) for each in values]
    return math.nan if values is None else float(values)
