"""pictures(figures): the documentation's pictures, from the committed `figures.json` of a comparison and nothing else.

The same drawings as in a page, each a file of its own with its style inside; equal data give equal bytes, whatever is
installed. A picture has a ground of its own, since the page around it may be light where the reader's system is dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from residua.lab.common.files import Record, Values
from residua.lab.plots import svg
from residua.lab.plots.charts import (
    PAPER,
    curve_charts,
    depth_charts,
    designs,
    measured_in,
    quality_charts,
    weight_maps,
)
from residua.lab.plots.sizes import size_charts
from residua.lab.plots.style import look_of

GAP, PAD = 24, 16
DEPTH = ("max_weight", "normalised_entropy", "stream_rms")


def pictures(figures: Record) -> dict[str, str]:
    """Name -> SVG, of every picture that the data allow."""
    data = listed(figures)
    measured = [one for one in measured_in(data) if one[0] in DEPTH]
    maps = [(figures["labels"][slug], each) for slug, each in figures["routing"].items()]
    maps.sort(key=lambda one: one[1]["signed"])
    found = {
        "curves": sheet(curve_charts(data), designs(data), 2),
        "routing": sheet(weight_maps(maps, headed=True), [], 3),
        "depth": sheet(depth_charts(data, measured), designs(data), 3),
        "quality": sheet(quality_charts(data), designs(data), 2),
        "sizes": sheet(size_charts(data), designs(data), 2),
    }
    return {name: text for name, text in found.items() if text}


def sheet(panels: Sequence[str], series: Sequence[Record], columns: int) -> str:
    """Panels side by side, below the names of the series."""
    panels = [panel for panel in panels if panel]
    if not panels:
        return ""
    box = r'viewBox="0 0 (\d+) (\d+)"'
    sized = [(panel, int(wide), int(high)) for panel in panels for wide, high in re.findall(box, panel)]
    rows = [sized[start : start + columns] for start in range(0, len(sized), columns)]
    widths = [sum(wide + GAP for _, wide, _ in row) for row in rows]
    names, y = legend(series, max(widths))
    y, width, placed = y + PAD, max(widths) - GAP + 2 * PAD, []
    for row in rows:
        x = PAD
        for panel, wide, _ in row:
            placed.append(panel.replace("<svg ", f'<svg x="{x}" y="{y:.0f}" ', 1))
            x += wide + GAP
        y += max(high for *_, high in row) + GAP
    height = y - GAP + PAD
    # a panel says its width and lets the browser find its height; inside another picture it has to say both
    placed = [re.sub(box, r'height="\2" viewBox="0 0 \1 \2"', each) for each in placed]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><style>{svg.STYLE}</style>'
        f'<rect class="ground" width="{width:.0f}" height="{height:.0f}" rx="8"/>{names}{"".join(placed)}</svg>\n'
    )


def legend(series: Sequence[Record], width: float) -> tuple[str, float]:
    """The names of the series beside their lines, and how high that is."""
    parts, x, y = [], float(PAD), 12.0
    for each in series:
        room = 36 + 7.2 * len(each["label"]) + 16
        if x + room > PAD + width and x > PAD:
            x, y = float(PAD), y + 20
        parts.append(
            f'<g class="{svg.style(each)}"><path class="line" d="M{x:.0f} {PAD + y - 4:.0f}h26"/></g>'
            f'<text class="label" x="{x + 34:.0f}" y="{PAD + y:.0f}">{escape(each["label"])}</text>'
        )
        x += room
    return "".join(parts), y + 14 if series else 0.0


def listed(figures: Record) -> Values:
    """The figures as the page has them: series in a list."""
    return {
        "series": [{"label": label, **look_of(figures, slug)} for slug, label in figures["labels"].items()],
        "paper": PAPER,
    } | {key: [figures[key].get(slug) for slug in figures["labels"]] for key in ("curves", "depth", "quality")}
