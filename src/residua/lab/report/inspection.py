"""inspection(found): the page data of one model and one prompt, in the form of a comparison of one.

What is given, ready for JSON:

    model      its name or path                     design    its spec
    prompt     the text                             tokens    the text of every token
    record     `RoutingRecord.summary()`            weights   site -> [lane][source][token][group]
    attention  site -> mean weight 0, 1, 2, ... tokens back; may be left out
    loss       of the prompt, nats per token; may be left out
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from residua.lab import figures
from residua.lab.common.files import Record, Values
from residua.lab.report.data import PROMPTED, Looked, checked, page_data
from residua.lab.report.look import Look
from residua.lab.report.text import visible, visible_piece
from residua.lab.runs import FinishedRun, Series

SLUG = "model"


def inspection(found: Record) -> Values:
    """Everything the page shows of one model and prompt."""
    needed = [key for key in ("model", "design", "prompt", "tokens", "record", "weights") if key not in found]
    if needed:
        raise ValueError(f"an inspection needs {', '.join(needed)} to be drawn")
    # JSON writes None for what is not a number; numpy reads it as that
    weights = {site: torch.from_numpy(np.array(values, np.float32)) for site, values in found["weights"].items()}
    means = {site: each.mean((0, 2, 3)).tolist() for site, each in weights.items()}
    record = {**found["record"], "mean_weights": means}
    looked = Look(record, weights, dict(found.get("attention") or {}))
    series = Series(found["design"], SLUG, SLUG, 1, [FinishedRun(folder=Path(), seed=0, result={}, routing=record)])
    drawn = figures.of_records({SLUG: series})
    drawn |= {"labels": {SLUG: series.label}, "quality": {SLUG: {"baseline": SLUG}}}
    tokens = [visible_piece(text) or "<special>" for text in found["tokens"]]
    data = page_data(
        [series], {SLUG: Looked(tokens, [looked])}, drawn, {SLUG: PROMPTED},
        title=visible(found["model"]), kind="inspection", notes=[], summary=None, curves=[], quality=[None],
        prompt=found["prompt"], loss=found.get("loss"), costs=[None], runs=None,
    )  # fmt: skip
    absent = {}
    if not data["routing"][0]:
        absent = {"routing": f"{visible(found['design'])} mixes no sources.", "tokens": "No weights."}
    if not any(data["axes"][0].values()):
        absent["axes"] = "It reads no sources by age, and its attention was not recorded."
    return checked(data, absent)
