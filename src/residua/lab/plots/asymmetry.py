"""The asymmetry of the two axes: what a window of attention adds, over tokens and over layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from residua.lab.common.files import Record
from residua.lab.common.tables import short
from residua.lab.plots.frame import below, empty
from residua.lab.plots.style import CYCLE, MARKERS, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def asymmetry(data: Record) -> Figure:
    """A panel for each quantity, a line for each placement; from the data of `residua.lab.cost.asymmetry` alone."""
    titles = data["titles"]
    figure = empty(11.5, 6.2)
    drawn = list(figure.subplots(2, 3, squeeze=False).flat)
    for axes, (key, title) in zip(drawn, titles.items(), strict=True):
        values = []
        for colour, marker, (label, series) in zip(CYCLE, MARKERS, data["added"].items(), strict=False):
            points = [(x, y) for x, y in zip(data["windows"], series[key], strict=True) if y is not None]
            axes.plot(*zip(*points, strict=True), color=OKABE_ITO[colour], marker=marker, markersize=4, label=label)
            values += [y for _, y in points]
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel("window")
        _scale(axes, values)
    handles, labels = drawn[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=8.5)
    model = data["model"]
    below(
        figure,
        f"Added to a model of {model['depth']} blocks of width {model['width']} by one window of attention, "
        f"{data['tokens']} tokens, {data['dtype']}, {data['path']} path. Predicted by residua cost --asymmetry; zero "
        "means nothing is added.",
    )
    return figure


def _scale(axes: Axes, values: list[float]) -> None:
    """Logarithmic above the smallest value, with room for zero below it."""
    top = max(values)
    if top <= 0:
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0])
        return
    least = 10.0 ** math.floor(math.log10(min(value for value in values if value > 0)))
    decades = [least * 10**step for step in range(math.ceil(math.log10(top / least)) + 1)]
    axes.set_yscale("symlog", linthresh=least, linscale=0.4)
    axes.set_ylim(-0.03 * least, 1.6 * top)
    axes.set_yticks([0, *(one for one in decades if one <= 1.6 * top)])
    axes.yaxis.set_major_formatter(lambda y, _: short(y))
    axes.minorticks_off()
