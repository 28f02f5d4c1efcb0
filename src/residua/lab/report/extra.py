"""paths, knock-outs and passes: the data of the views that look further than the mean weights.

Each is one entry a series, None where a series has none; the rows and columns are those of the routing explorer, and
so is the order of the cells: those of a site one after the other, the sites one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from residua.lab.common.files import Record, Values
from residua.lab.diagnose import Ablation, ablate_sources
from residua.lab.figures import means
from residua.lab.report.explorer import packed
from residua.lab.report.text import visible_piece
from residua.lab.runs import FinishedRun, rounded
from residua.lab.train import TrainConfig
from residua.lab.train.reproducible import reproducible
from residua.model import Transformer

ABLATED = 8
"""Validation sequences that the loss without a source is measured on: those that the mean weights are of."""
PASS = re.compile(r"(l\d+)(?:p(\d+))?_(.+)")
"""A site of a block, and the pass over it: l1_attn, l1p2_attn."""


def paths(found: Record | None, route: Record | None, seed: int) -> Values | None:
    """What reached the logits of the prompt in one seed, as `lab.diagnose.inspect.paths_of` says it."""
    if found is None or route is None:
        return None
    sites = [name for name in route["sites"] if name in found["sources"]]
    targets = []
    for each in found["targets"]:
        cells = [row for name in sites for row in each["parts"][name]]
        step, (texts,) = packed([[[0.0 if value is None else value for row in cells for value in row]]])
        targets.append(
            {"title": each["title"], "tokens": [visible_piece(name) for name in each["tokens"]], "step": step,
             "packed": texts,
             **{key: [None if value is None else rounded(value) for value in each[key]] for key in ("logits", "rest")}}
        )  # fmt: skip
    places = {name: place for place, name in enumerate(route["sources"])}
    return {
        "seed": seed,
        "exact": found["exact"],
        "sites": sites,
        "sources": route["sources"],
        "reads": [[places[source] for source in found["sources"][name]] for name in sites],
        "targets": targets,
    }


def ablated(model: Transformer, seed: FinishedRun) -> Ablation:
    """The loss of a run without each source of each site, on the validation text that its mean weights are of."""
    from residua.lab.data import prepare

    config = seed.config
    if not model.config.causal:
        raise ValueError(f"knock-outs ask for the next token, and the objective is {config.objective}")
    valid = prepare(config.corpus, config.tokenizer).valid
    count = min(ABLATED, (len(valid) - 1) // config.context)
    text = torch.from_numpy(valid[: count * config.context + 1].astype("int64"))
    with reproducible(TrainConfig(threads=1)):
        return ablate_sources(model, text[:-1].view(count, -1), text[1:].view(count, -1))


def knockouts(each: Sequence[Ablation | None], route: Record | None, seeds: Sequence[int]) -> Values | None:
    """[cell] of the mean over seeds, and of every seed, with the loss that the changes are from."""
    known = [one for one in each if one is not None]
    if route is None or not known or len(known) < len(each):
        return None
    grids = [
        [one.change[name][route["sources"][place]] for name, reads in _rows(route) for place in reads] for one in known
    ]
    return {
        "sites": route["sites"],
        "sources": route["sources"],
        "reads": route["reads"],
        "seeds": list(seeds),
        "loss": [rounded(one.loss) for one in known],
        "mean": means(grids),
        "each": [[rounded(value) for value in grid] for grid in grids],
    }


def passes(route: Record | None) -> Values | None:
    """The mean weights of repeated blocks, pass by pass: [pass][site][source]; None for a network without a loop."""
    if route is None:
        return None
    found: dict[str, dict[int, int]] = {}
    for place, name in enumerate(route["sites"]):
        if named := PASS.fullmatch(name):
            found.setdefault(f"{named[1]}_{named[3]}", {})[int(named[2] or 0)] = place
    repeated = {name: own for name, own in found.items() if len(own) > 1 or any(own)}
    if not repeated:
        return None
    cells = grid_of(route, route["means"]["mean"][0])
    nothing: list[float | None] = [None] * len(route["sources"])
    count = 1 + max(turn for own in repeated.values() for turn in own)
    return {
        "sites": list(repeated),
        "sources": route["sources"],
        "signed": route["signed"],
        "weights": [
            [cells[own[turn]] if turn in own else nothing for own in repeated.values()] for turn in range(count)
        ],
    }


def grid_of(each: Record, cells: Sequence[float | None]) -> list[list[float | None]]:
    """[site][source] of a list of cells; None where a site cannot read a source."""
    flat, rows = iter(cells), []
    for reads in each["reads"]:
        own = {source: next(flat) for source in reads}
        rows.append([own.get(source) for source in range(len(each["sources"]))])
    return rows


def _rows(route: Record) -> list[tuple[str, list[int]]]:
    return list(zip(route["sites"], route["reads"], strict=True))
