"""A comparison over several sizes as pictures: loss, and how sharp deep reads are, one line a design.

The label of a row ends in its size, as ` | 8x64`; where rows have more than one, a design has one line over them all.
"""

from __future__ import annotations

import re

from residua.lab.common.files import Record, Values
from residua.lab.plots import svg
from residua.lab.runs import mean_if_all

_SIZED = re.compile(r"(?P<design>.*) \| (?P<depth>\d+)x(?P<width>\d+)")
AXIS = "blocks x width"


def size_charts(data: Record) -> tuple[list[str], list[Values]]:
    """The charts, and the designs as the legend takes them; both empty where there is one size only."""
    rows: dict[str, dict[tuple[int, int], int]] = {}
    for place, each in enumerate(data["series"]):
        if (found := _SIZED.fullmatch(each["label"])) is None or data["quality"][place] is None:
            return [], []
        rows.setdefault(found["design"], {})[int(found["depth"]), int(found["width"])] = place
    sizes = sorted({size for by_size in rows.values() for size in by_size})
    if len(sizes) < 2:
        return [], []
    # a design looks as its first row does: one of each colour and dash, whatever comes after
    first = {name: data["series"][next(iter(by_size.values()))] for name, by_size in rows.items()}
    series = [{"label": name, "colour": one["colour"], "dash": one["dash"]} for name, one in first.items()]
    loss: list[svg.Line] = []
    shares: list[svg.Line] = []
    for each, by_size in zip(series, rows.values(), strict=True):
        style, name = svg.style(each), each["label"]
        at = [(x, by_size[size]) for x, size in enumerate(sizes) if size in by_size]
        bands = [(x, data["quality"][place]["bits_per_byte"]) for x, place in at]
        known = [(x, band) for x, band in bands if band["mean"] is not None]
        mean, low, high = ([band[part] for _, band in known] for part in ("mean", "low", "high"))
        loss.append(svg.Line(style, name, [x for x, _ in known], mean, low, high, dots=True))
        deep = [(x, share) for x, place in at if (share := _deep_share(data["depth"][place])) is not None]
        shares.append(svg.Line(style, name, [x for x, _ in deep], [share for _, share in deep], dots=True))
    names = [f"{depth}x{width}" for depth, width in sizes]
    paper = [(data["paper"][what], f"paper, {what}") for what in ("states", "deltas")]
    charts = [
        svg.lines(svg.Chart("bits per byte", AXIS, loss, names=names)),
        svg.lines(svg.Chart("largest share of a read, deep third", AXIS, shares, True, None, paper, names=names)),
    ]
    return [chart for chart in charts if chart], series


def _deep_share(depth: Record | None) -> float | None:
    """The mean over the sites of the deep third that choose."""
    if depth is None:
        return None
    sites = zip(depth["max_weight"], depth["deep"], strict=True)
    return mean_if_all(share for share, deep in sites if deep and share is not None)
