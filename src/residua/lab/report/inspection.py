"""inspection(found): the page data of one prompt in one model, or in two, in the form of a comparison.

What is given, ready for JSON:

    model      its name or path                     design    its spec
    prompt     the text                             tokens    the text of every token
    record     `RoutingRecord.summary()`            weights   site -> [lane][source][token][group]
    attention  site -> mean weight 0, 1, 2, ... tokens back; may be left out
    paths      what reached the logits, as `lab.diagnose.inspect.paths_of` says it; may be left out
    loss       of the prompt, nats per token; may be left out
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from residua.lab import figures
from residua.lab.common.files import Record, Values
from residua.lab.report.data import PROMPTED, Looked, checked, page_data
from residua.lab.report.look import Look
from residua.lab.report.text import visible, visible_piece
from residua.lab.runs import FinishedRun, Series

MOST = 2
"""Models on one page: one, or one beside another."""


def inspection(*found: Record) -> Values:
    """Everything the page shows of one prompt in one model, or in two side by side: before and after, say."""
    if not 0 < len(found) <= MOST:
        raise ValueError(f"a page shows one model or two, not {len(found)}")
    for each in found:
        if needed := [key for key in ("model", "design", "prompt", "tokens", "record", "weights") if key not in each]:
            raise ValueError(f"an inspection needs {', '.join(needed)} to be drawn")
    labels = labels_of(found)
    shown, looked, texts = [], {}, []
    for place, (label, each) in enumerate(zip(labels, found, strict=True)):
        slug = f"model{place}"
        seen = _seen(each)
        run = FinishedRun(folder=Path(), seed=0, result={}, routing=seen.record)
        shown.append(Series(label, slug, "model0", 1, [run]))
        texts.append([visible_piece(text) or "<special>" for text in each["tokens"]])
        looked[slug] = Looked(texts[-1], [seen])
    drawn = figures.of_records({each.slug: each for each in shown})
    drawn |= {
        "labels": {each.slug: each.label for each in shown},
        "quality": {each.slug: {"baseline": "model0"} for each in shown},
    }
    data = page_data(
        shown, looked, drawn, dict.fromkeys(looked, PROMPTED),
        title=visible(" beside ".join(dict.fromkeys(str(each["model"]) for each in found))), kind="inspection",
        notes=_notes(found, texts), summary=None, curves=[], quality=[None] * len(found), prompt=found[0]["prompt"],
        loss=[each.get("loss") for each in found], costs=[None] * len(found), ladder=None, runs=None,
    )  # fmt: skip
    return checked(data, _absent(data, found))


def labels_of(found: Sequence[Record]) -> list[str]:
    """What tells the models apart: their designs, or with them their names, or that one comes first."""
    for make in (
        lambda each: each["design"],
        lambda each: f"{each['design']} | {Path(each['model']).name}",
        lambda each: f"{each['design']} | {each['model']}",
    ):
        labels = [str(make(each)) for each in found]
        if len(set(labels)) == len(found):
            return labels
    return [f"{label}, {which}" for label, which in zip(labels, ("first", "second"), strict=False)]


def _seen(found: Record) -> Look:
    # JSON writes None for what is not a number; numpy reads it as that
    weights = {site: torch.from_numpy(np.array(values, np.float32)) for site, values in found["weights"].items()}
    means = {site: each.mean((0, 2, 3)).tolist() for site, each in weights.items()}
    return Look(
        {**found["record"], "mean_weights": means}, weights, dict(found.get("attention") or {}), found.get("paths")
    )


def _notes(found: Sequence[Record], texts: Sequence[Sequence[str]]) -> list[str]:
    if len(found) == 1 or texts[0] == texts[1]:
        return []
    return ["The two models cut the prompt into different tokens: compare their means, not single tokens."]


def _absent(data: Record, found: Sequence[Record]) -> dict[str, str]:
    """Views without data, and why."""
    absent = {}
    if not any(data["routing"]):
        said = " ".join(dict.fromkeys(f"{visible(each['design'])} mixes no sources." for each in found))
        absent = dict.fromkeys(("routing", "paths"), said) | {"tokens": "No weights."}
    elif not any(data["paths"]):
        absent["paths"] = "What reached the logits was not recorded for this page."
    if not any(axes[key] for axes in data["axes"] for key in axes):
        absent["axes"] = "It reads no sources by age, and its attention was not recorded."
    return absent
