"""The data of the routing explorer: for one series the weights by site, source, seed, lane or head, and token.

A site reads some of the sources. Its cells stand one after the other, oldest source first, and the sites one after the
other: `reads` says which source a cell belongs to. A view is `mean`, a lane or a head; in each the other axes are
averaged. Means are numbers; the weights of single tokens are whole multiples of `step`, packed as 16 bits.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor

from residua.lab.common.files import Record, Values
from residua.lab.figures import means as means_of
from residua.lab.report.look import Look
from residua.lab.runs import rounded

MEAN = "mean"
MOST_HEADS = 16
"""Designs that weigh every channel apart have groups of one, which nobody can look at one by one."""
MOST_PACKED = 400_000
"""Weights of single tokens in one page: a megabyte."""
FEWEST_TOKENS = 16
MOST_MEANS = 120_000
"""Mean weights in one page, over seeds and of each: another megabyte."""
LARGEST = 32767


def explorer(
    routing: Record,
    seeds: Sequence[tuple[int, Record, Look | None]],
    tokens: Sequence[str] | None,
    sample: str,
) -> Values:
    """One series: `routing` is its part of the figures, `tokens` those of the prompt, or None where none was run, and
    `sample` what the means are over."""
    first = seeds[0][1]
    known = {site["site"]: site for site in first["sites"]}
    sources = {name: place for place, name in enumerate(routing["sources"])}
    sites = [known[name] for name in routing["sites"]]
    over_seeds = [
        routing["weights"][place][sources[source]] for place, site in enumerate(sites) for source in site["sources"]
    ]
    views = _views(sites, [found for _, _, found in seeds])
    means: dict[str, list[list[float | None] | None]] = {}
    for view in views:
        own = [_mean_cells(record, found, routing["sites"], view) for _, record, found in seeds]
        there = [cells for cells in own if cells is not None]
        means[view] = [over_seeds if view == MEAN else means_of(there) if len(there) == len(own) else None, *own]
    return {
        "sites": routing["sites"],
        "kinds": [site["kind"] for site in sites],
        "sources": routing["sources"],
        "reads": [[sources[source] for source in site["sources"]] for site in sites],
        "signed": routing["signed"],
        "collapsed": [_collapsed([record for _, record, _ in seeds], name) for name in routing["sites"]],
        "sample": sample,
        "seeds": [number for number, _, _ in seeds],
        "views": views,
        "means": means,
        "tokens": None if tokens is None else list(tokens),
        "step": None,
        "packed": None,
    }


def bound(every: Mapping[str, Values]) -> list[str]:
    """Leave out the seeds, then the lanes and heads, of maps too large for one page; what was left out, in words."""

    def numbers() -> int:
        return sum(
            sum(map(len, data["reads"])) * len(data["views"]) * (1 + len(data["seeds"])) for data in every.values()
        )

    said = []
    if numbers() > MOST_MEANS:
        for data in every.values():
            data["seeds"], data["means"] = [], {view: means[:1] for view, means in data["means"].items()}
        said.append("To keep this page small, the weights are those of the mean over seeds.")
    if numbers() > MOST_MEANS:
        for data in every.values():
            data["views"], data["means"] = [MEAN], {MEAN: data["means"][MEAN]}
        said.append("To keep this page small, the weights are those of the mean over lanes and heads.")
    return said


def pack(every: Mapping[str, Values], looks: Mapping[str, Sequence[Look | None]]) -> list[str]:
    """Put the tokens' weights into the explorers, in a page of bounded size; what had to be left out, in words."""
    ready = {slug: data for slug, data in every.items() if data["tokens"] and all(looks[slug])}
    for data in every.values():
        if data not in ready.values():
            data["tokens"] = None
    if not ready:
        return []
    said = []
    tokens = max(len(data["tokens"]) for data in ready.values())
    seeds, views, kept = _room(list(ready.values()), tokens)
    if seeds is not None:
        only = "the first seed" if views is None else "the first seed, and the mean over lanes and heads,"
        said.append(f"To keep this page small, {only} alone is shown token by token.")
    if kept < tokens:
        said.append(f"To keep this page small, the first {kept} of {tokens} tokens are shown.")
    for slug, data in ready.items():
        data["tokens"] = data["tokens"][:kept]
        data["packed_seeds"], data["packed_views"] = data["seeds"][:seeds], data["views"][:views]
        chosen = [found for found in looks[slug][: 1 if not data["seeds"] else seeds] if found is not None]
        grids = [[_token_cells(found, data["sites"], view, kept) for view in data["packed_views"]] for found in chosen]
        data["step"], data["packed"] = packed(grids)
    return said


def _room(ready: Sequence[Record], tokens: int) -> tuple[int | None, int | None, int]:
    """How many seeds, views (None: all) and tokens a page of bounded size has room for: tokens are worth the most."""
    choices: tuple[tuple[int | None, int | None], ...] = ((None, None), (1, None), (1, 1))
    for seeds, views in choices:
        cells = sum(
            sum(map(len, data["reads"])) * max(1, len(data["seeds"][:seeds])) * len(data["views"][:views])
            for data in ready
        )
        room = MOST_PACKED // max(cells, 1)
        if room >= min(tokens, FEWEST_TOKENS):
            break
    return seeds, views, max(1, min(room, tokens))


def packed(grids: Sequence[Sequence[Sequence[float]]]) -> tuple[float, list[str]]:
    """Whole multiples of a power of ten that lets the largest fit; one string a seed, [view][cell][token]."""
    largest = max((abs(value) for value in chain.from_iterable(chain.from_iterable(grids))), default=0.0) or 1.0
    digits = math.floor(math.log10(LARGEST / largest))
    step = float(f"1e{-digits}")
    texts = []
    for views in grids:
        numbers = array("h", (round(value / step) for value in chain.from_iterable(views)))
        if sys.byteorder == "big":
            numbers.byteswap()
        texts.append(base64.b64encode(numbers.tobytes()).decode())
    return step, texts


def _views(sites: Sequence[Record], looks: Sequence[Look | None]) -> list[str]:
    lanes = max((len(site.get("routing", {}).get("mean_weights", [0])) for site in sites), default=1)
    found = next((found for found in looks if found is not None), None)
    groups = {weights.shape[-1] for weights in found.weights.values()} if found else {1}
    heads = max(groups) if max(groups, default=1) <= MOST_HEADS else 1
    names = ["q lane", "k lane", "v lane"] if lanes == 3 else [f"lane {lane}" for lane in range(lanes)]
    return [MEAN, *names[: lanes if lanes > 1 else 0], *(f"head {head}" for head in range(heads) if heads > 1)]


def _mean_cells(record: Record, found: Look | None, names: Sequence[str], view: str) -> list[float | None] | None:
    """The mean weights of a seed: over validation text, but for heads, which only the prompt has apart."""
    if view == MEAN:
        rows = [record["mean_weights"][name] for name in names]
    elif not view.startswith("head"):
        lanes = {site["site"]: site["routing"].get("mean_weights") for site in record["sites"] if "routing" in site}
        rows = [lanes[name][min(_place(view), len(lanes[name]) - 1)] for name in names]
    elif found is not None:
        rows = [_view(found.weights[name], view).mean(-1).tolist() for name in names]
    else:
        return None
    return means_of([list(chain.from_iterable(rows))])


def _token_cells(found: Look, names: Sequence[str], view: str, tokens: int) -> list[float]:
    return [
        value
        for name in names
        for value in _view(found.weights[name], view)[:, :tokens].nan_to_num(0.0, 0.0, 0.0).flatten().tolist()
    ]


def _view(weights: Tensor, view: str) -> Tensor:
    """[n t] of [lane n t group]: a site with fewer lanes or heads shows the one it has."""
    if view == MEAN:
        return weights.mean((0, 3))
    place = _place(view)
    if view.startswith("head"):
        return weights[..., min(place, weights.shape[-1] - 1)].mean(0)
    return weights[min(place, weights.shape[0] - 1)].mean(-1)


def _place(view: str) -> int:
    return "qkv".index(view[0]) if view.endswith(" lane") else int(view.rsplit(" ", 1)[1])


def _collapsed(records: Sequence[Record], name: str) -> float | None:
    """The share of seeds in which a site is judged collapsed; None where it has too few sources to be judged."""
    sites = [site.get("routing", {}) for record in records for site in record["sites"] if site["site"] == name]
    known = [verdict for site in sites if (verdict := site.get("collapsed")) is not None]
    return rounded(sum(known) / len(known)) if known else None
