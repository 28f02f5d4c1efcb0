"""Heat maps of the mean weights, site x source: one design a page, and all of them as small multiples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from residua.lab.common.files import Record
from residua.lab.plots.colour import is_dark
from residua.lab.plots.frame import empty, note, wrapped_label
from residua.lab.plots.style import PALE, Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

MOST_TICKS = 40
ANNOTATED_CELLS = 200
"""Maps up to this size have their numbers written in."""

_AVERAGED = "Mean over lanes, tokens, groups and seeds. Grey: not a source of that site."


def alone(figures: Figures, slug: str) -> Figure:
    """One design, with its numbers where there is room for them."""
    data = figures["routing"][slug]
    rows, columns = len(data["sites"]), len(data["sources"])
    annotated = rows * columns <= ANNOTATED_CELLS
    figure = empty(min(12.0, 3.0 + (0.36 if annotated else 0.25) * columns), min(11.0, max(3.0, 1.6 + 0.24 * rows)))
    axes = figure.add_subplot()
    norm = _norm(data["signed"], [data])
    _heat_map(axes, data, norm, most_ticks=MOST_TICKS)
    if annotated:
        _write_numbers(axes, data, norm)
    axes.set_title(wrapped_label(figures["labels"][slug], int(11 * figure.get_figwidth())))
    axes.set_xlabel("source")
    axes.set_ylabel("site that reads")
    _colour_bar(figure, [axes], norm, data["signed"])
    note(figure, figures, _AVERAGED)
    return figure


def page(figures: Figures) -> Figure:
    """Small multiples: one colour scale for the designs with signed weights, and one for the others."""
    routing = figures["routing"]
    columns = min(len(routing), 2 if len(routing) in (2, 4) else 3)
    rows = math.ceil(len(routing) / columns)
    figure = empty(3.6 * columns + 1.2, 3.1 * rows + 0.4)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    kinds = sorted({data["signed"] for data in routing.values()})
    norms = {signed: _norm(signed, [each for each in routing.values() if each["signed"] is signed]) for signed in kinds}
    for axes, (slug, data) in zip(grid, routing.items(), strict=False):
        _heat_map(axes, data, norms[data["signed"]], most_ticks=10)
        axes.set_title(wrapped_label(figures["labels"][slug], 36))
    for axes in grid[len(routing) :]:
        axes.remove()
    for signed, norm in norms.items():
        _colour_bar(figure, grid[: len(routing)], norm, signed)
    without = [label for slug, label in figures["labels"].items() if slug not in routing]
    said = f" No weights to show: {', '.join(without)}." if without else ""
    note(figure, figures, f"Rows: sites. Columns: sources by depth. {_AVERAGED}{said}")
    return figure


def _heat_map(axes: Axes, data: Record, norm: Normalize, *, most_ticks: int) -> None:
    weights = np.array(data["weights"], dtype=float)  # None becomes NaN
    rows, columns = weights.shape
    axes.imshow(
        np.ma.masked_invalid(weights), norm=norm, cmap=_colours(data["signed"]),
        interpolation="none", aspect="auto", extent=(0, columns, rows, 0),
    )  # fmt: skip
    axes.set_facecolor(PALE)
    axes.grid(False)
    for axis, names in ((axes.xaxis, data["sources"]), (axes.yaxis, data["sites"])):
        step = math.ceil(len(names) / most_ticks)
        axis.set_ticks([place + 0.5 for place in range(0, len(names), step)], names[::step])
        axis.set_tick_params(length=0, labelsize=7)
    axes.tick_params(axis="x", labelrotation=90)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_numbers(axes: Axes, data: Record, norm: Normalize) -> None:
    colours = _colours(data["signed"])
    for row, weights in enumerate(data["weights"]):
        for column, weight in enumerate(weights):
            if weight is None:
                continue
            red, green, blue, _ = colours(norm(weight))
            dark = is_dark((round(255 * red), round(255 * green), round(255 * blue)))
            text = f"{round(weight, 2) + 0.0:.2f}"  # + 0.0: no negative zero
            axes.text(
                column + 0.5, row + 0.5, text.removeprefix("0").replace("-0.", "-."),
                ha="center", va="center", fontsize=6.5, color="white" if dark else "black",
            )  # fmt: skip


def _norm(signed: bool, every: Sequence[Record]) -> Normalize:
    """Square roots of the weights, so that the many small ones show beside the few large ones; the sign is kept."""
    from matplotlib.colors import FuncNorm

    sizes = [abs(weight) for data in every for row in data["weights"] for weight in row if weight is not None]
    largest = max(sizes, default=0.0) or 1.0
    functions: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (
        lambda x: np.sign(x) * np.sqrt(np.abs(x)),
        lambda x: np.sign(x) * np.square(x),
    )
    return FuncNorm(functions, vmin=-largest if signed else 0.0, vmax=largest)


def _colours(signed: bool) -> Any:
    import matplotlib as mpl

    return mpl.colormaps["PuOr_r" if signed else "viridis"]


def _colour_bar(figure: Figure, axes: Sequence[Axes], norm: Normalize, signed: bool) -> None:
    from matplotlib.cm import ScalarMappable

    shown, height = ScalarMappable(norm, _colours(signed)), figure.get_figheight()
    bar = figure.colorbar(shown, ax=list(axes), fraction=0.04, pad=0.02, aspect=height / 0.16)
    ticks = _root_ticks(float(norm.vmax or 0.0), apart=(0.6 if signed else 0.3) / height)
    bar.set_ticks([-tick for tick in reversed(ticks[1:])] + ticks if signed else ticks)
    bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    bar.set_label("mean weight" + (", signed" if signed else "") + " (square-root scale)")
    bar.outline.set_visible(False)


def _root_ticks(top: float, apart: float) -> list[float]:
    """Round numbers from 0 on, and `top` itself: at least so far apart on a square-root scale that is 1 long."""
    decade = 10.0 ** math.floor(math.log10(top))
    below = [decade * share * size for share in (0.01, 0.1) for size in (1, 2, 5)]
    ticks = [0.0]
    for value in (*below, *(decade * size for size in (1, 2, 4, 6, 8))):
        if value <= top and math.sqrt(value / top) - math.sqrt(ticks[-1] / top) >= apart:
            ticks.append(float(f"{value:.1g}"))
    # a bar that ends above its last number would leave the largest weights without one
    while len(ticks) > 1 and 1 - math.sqrt(ticks[-1] / top) < apart:
        ticks.pop()
    return [*ticks, float(f"{top:.3g}")]
