"""A comparison over several sizes as pictures: loss, and how sharp deep reads are, one line a design."""

from __future__ import annotations

from residua.lab.common.files import Record
from residua.lab.plots import svg
from residua.lab.plots.charts import designs, labels
from residua.lab.plots.parted import by_size
from residua.lab.runs import mean_if_all

AXIS = "blocks x width"


def size_charts(data: Record) -> list[str]:
    """The charts; none where there is one size only."""
    sizes = by_size(labels(data))
    if len(sizes) < 2 or None in data["quality"]:
        return []
    rows: dict[str, dict[str, int]] = {}
    for size, places in sizes.items():
        for place, name in places.items():
            rows.setdefault(name, {})[size] = place
    loss: list[svg.Line] = []
    shares: list[svg.Line] = []
    for each in designs(data):
        style, name = svg.style(each), each["label"]
        at = [(x, rows[name][size]) for x, size in enumerate(sizes) if size in rows[name]]
        bands = [(x, data["quality"][place]["bits_per_byte"]) for x, place in at]
        known = [(x, band) for x, band in bands if band["mean"] is not None]
        mean, low, high = ([band[part] for _, band in known] for part in ("mean", "low", "high"))
        loss.append(svg.Line(style, name, [x for x, _ in known], mean, low, high, dots=True))
        deep = [(x, share) for x, place in at if (share := _deep_share(data["depth"][place])) is not None]
        shares.append(svg.Line(style, name, [x for x, _ in deep], [share for _, share in deep], dots=True))
    paper = [(data["paper"][what], f"paper, {what}") for what in ("states", "deltas")]
    charts = [
        svg.lines(svg.Chart("bits per byte", AXIS, loss, names=list(sizes))),
        svg.lines(svg.Chart("largest share of a read, deep third", AXIS, shares, True, None, paper, names=list(sizes))),
    ]
    return [chart for chart in charts if chart]


def _deep_share(depth: Record | None) -> float | None:
    """The mean over the sites of the deep third that choose."""
    if depth is None:
        return None
    sites = zip(depth["max_weight"], depth["deep"], strict=True)
    return mean_if_all(share for share, deep in sites if deep and share is not None)
