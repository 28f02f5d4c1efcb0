"""The two axes as a grid: how a read's weights are made, against what is mixed and how far back."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from residua.lab.plots.frame import below, empty
from residua.lab.plots.style import OKABE_ITO, PALE
from residua.lab.taxonomy import BOTH, FIXED, KEY, QUERY, STATIC, Entry, mixers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = {
    FIXED: "fixed: constants",
    STATIC: "static: parameters alone",
    KEY: "key side: from the source weighed",
    QUERY: "query side: from the newest",
    BOTH: "both: queries and keys",
}
COLUMNS = ("all layers", "a window of layers", "a window of tokens", "all tokens")
RECURRENT = "no read of this form:\na recurrent state"


def grid(entries: Sequence[Entry]) -> Figure:
    """Designs on the left, over depth; sublayers on the right, over tokens; from the probed map alone."""
    cells: dict[tuple[str, int], list[str]] = {}
    for one in entries:
        if one.instance:
            cells.setdefault((one.weights, int(one.window != "all")), []).append(one.design)
    for mixer in mixers():
        cells.setdefault((mixer.weights, 3 if mixer.window == "all" else 2), []).append(mixer.kind)
    figure = empty(10.5, 5.0)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-1.05, 4)
    axes.set_ylim(len(ROWS) + 1, -1.0)
    for place, title in enumerate(COLUMNS):
        axes.text(place + 0.5, -0.18, title, ha="center", va="center", fontsize=9)
    for place, title in enumerate(("over depth: the layers of a token", "over tokens")):
        axes.text(2 * place + 1, -0.62, title, ha="center", va="center", fontsize=10, color=_colour(2 * place))
    for height, (row, title) in enumerate(ROWS.items()):
        axes.text(-0.04, height + 0.5, title, ha="right", va="center", fontsize=8.5)
        for place in range(4):
            _cell(axes, place, height, 1, cells.get((row, place), []))
    axes.text(-0.04, len(ROWS) + 0.5, RECURRENT, ha="right", va="center", fontsize=8.5)
    _cell(axes, 0, len(ROWS), 2, [one.design for one in entries if not one.instance])
    below(
        figure,
        "One operator, two ordered axes: a design and a sublayer in one row are the same kind of read, over layers and "
        "over tokens. Placed by probing each of them.",
    )
    return figure


def _colour(column: int) -> str:
    return OKABE_ITO["blue" if column < 2 else "vermillion"]


def _cell(axes: Axes, column: int, row: int, width: int, held: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (column + 0.02, row + 0.06),
            width - 0.04,
            0.88,
            edgecolor="none",
            zorder=0,
            facecolor=_colour(column) if held else PALE,
            alpha=0.14 if held else 0.5,
        )
    )
    text = textwrap.fill(", ".join(held), 30 * width, break_on_hyphens=False, break_long_words=False)
    axes.text(column + width / 2, row + 0.5, text, ha="center", va="center", fontsize=7.5)
