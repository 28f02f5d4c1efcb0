"""A figure with its legend and notes outside the axes."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from residua.lab.plots.parted import by_size
from residua.lab.plots.style import GREY, Figures, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def empty(width: float, height: float) -> Figure:
    """A blank one, in inches, that lays itself out; no window and no global state knows of it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(
    figures: Figures, count: int, *, only: Sequence[str] | None = None, share_y: bool = False, shown_as: str = "-o"
) -> tuple[Figure, list[tuple[Sequence[str], list[Axes]]]]:
    """A row of panels, or one for every size, each with the slugs that it shows.

    The legend of the series is outside: on the right, or above where the labels are long.

    shown_as: what stands for a series there, a line (-), its marker (o) or both.
    """
    from matplotlib.lines import Line2D

    every = styles(figures)
    sizes = by_size({slug: label for slug, label in figures["labels"].items() if only is None or slug in only})
    shown: dict[str, str] = {}
    for rows in sizes.values():
        for slug, name in rows.items():
            shown.setdefault(name, slug)
    labels = list(shown)
    longest = max(map(len, labels))
    beside = longest <= 26 and len(labels) <= 16
    width = 3.7 * count + (0.5 + 0.075 * longest if beside else 0.0)
    per_row = 1 if beside else max(1, int(13.0 * width // (longest + 6)))
    height = 3.5 * len(sizes)
    figure = empty(width, height if beside else height + 0.19 * math.ceil(len(labels) / per_row))
    axes = figure.subplots(len(sizes), count, sharey="row" if share_y else False, squeeze=False)
    for size, (first, *_) in zip(sizes, axes, strict=True):
        if size:  # outside, where no title and no axis is
            first.annotate(
                size, (0, 1), (-30, 14), "axes fraction", textcoords="offset points", fontsize=9.5, fontweight="bold",
                ha="right",
            )  # fmt: skip
    handles = [
        Line2D(
            [], [], color=style.colour, linestyle=style.dash if "-" in shown_as else "",
            marker=style.marker if "o" in shown_as else "", markersize=4 if "-" in shown_as else 7,
        )
        for style in (every[slug] for slug in shown.values())
    ]  # fmt: skip
    figure.legend(
        handles, labels, ncols=per_row, fontsize=8.5, handlelength=2.6, borderaxespad=0.2,
        loc="outside right upper" if beside else "outside upper left",
    )  # fmt: skip
    return figure, [(list(rows), list(own)) for rows, own in zip(sizes.values(), axes, strict=True)]


def note(figure: Figure, figures: Figures, text: str = "") -> None:
    """What the marks mean and what a reader must know, below the plot."""
    lines = [line for line in (text, *figures["notes"]) if line]
    if lines:
        room = int(16.5 * figure.get_figwidth())
        wrapped = "\n".join(textwrap.fill(line, room, break_on_hyphens=False) for line in lines)
        below(figure, wrapped)


def below(figure: Figure, text: str) -> None:
    """Small print under the axes."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=GREY)


def wrapped_label(label: str, width: int) -> str:
    """A spec in lines, cut after its commas and bars."""
    lines = [""]
    for part in re.findall(r".+?(?:,| \| |$)", label):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
