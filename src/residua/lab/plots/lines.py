"""Plots of lines and points, one for each series: training curves, numbers over depth, quality against cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from residua.lab.common.files import Record
from residua.lab.common.tables import short
from residua.lab.plots.frame import note, panels
from residua.lab.plots.style import GREY, Figures, points_over_depth, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTTED = 40
"""Lines of more points are drawn without a dot for each."""


def curves(figures: Figures, axis: str, title: str, *, enlarged: float) -> Figure:
    """Once from the start, and once from that share of the shortest series on, with a scale of its own."""
    figure, drawn = panels(figures, 2, shown_as="-")
    every, uneven = styles(figures), False
    for slugs, (whole, end) in drawn:
        curves = {slug: figures["curves"][slug] for slug in slugs}
        lasts = [curve[axis][-1] for curve in curves.values()]
        starts = enlarged * min(lasts)
        seen: list[float] = []
        for slug, curve in curves.items():
            style, x, loss = every[slug], curve[axis], curve["loss"]
            for axes in (whole, end):
                axes.plot(x, loss["mean"], color=style.colour, linestyle=style.dash)
                axes.fill_between(x, loss["low"], loss["high"], color=style.colour, alpha=0.18, linewidth=0)
            for edge in (loss["low"], loss["high"]):
                seen += [float(np.interp(starts, x, edge)), *(y for at, y in zip(x, edge, strict=True) if at >= starts)]
        room = 0.04 * (max(seen) - min(seen)) or 0.01
        end.set_ylim(min(seen) - room, max(seen) + room)
        if max(lasts) > starts:
            end.set_xlim(starts, max(lasts))
        if min(lasts) < max(lasts):
            end.axvline(min(lasts), color=GREY, linewidth=0.8, zorder=1)
            uneven = True
        whole.set_title("whole run")
        end.set_title("the end of it, enlarged")
        for axes in (whole, end):
            axes.set_xlabel(title)
            axes.xaxis.set_major_formatter(lambda x, _: short(x))
        whole.set_ylabel("validation loss (nats per token)")
    said = [f"Line: mean over seeds. Band: {figures['band']}."] if max(figures["seeds"].values()) > 1 else []
    said += ["Grey line: the first one is done, the others are in mid-schedule."] if uneven else []
    note(figure, figures, " ".join(said))
    return figure


def over_depth(figures: Figures, titles: Mapping[str, str], *, shares: bool) -> Figure:
    """A panel for each number, a line for each series that has it; `shares` are from 0 to 1."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    present = [
        slug for slug in figures["depth"] if any(points_over_depth(figures["depth"][slug], key)[0] for key in titles)
    ]
    figure, drawn = panels(figures, len(titles), only=present)
    every, marked = styles(figures), False
    cells = [(slugs, *one) for slugs, axes in drawn for one in zip(axes, titles.items(), strict=True)]
    for slugs, axes, (key, title) in cells:
        values: list[float] = []
        for slug in slugs:
            x, y = points_over_depth(figures["depth"][slug], key)
            style = every[slug]
            size = 3 if len(x) <= DOTTED else 0
            axes.plot(x, y, color=style.colour, linestyle=style.dash, marker=style.marker, markersize=size)
            values += y
        axes.set_title(title)
        axes.set_xlabel("Transformer block (the head is last)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if shares:
            axes.set_ylim(0, 1.03)
        elif min(values, default=0) > 0 and max(values) > 8 * min(values):
            axes.set_yscale("log")
            subs = (1.0, 2.0, 5.0) if max(values) / min(values) < 200 else (1.0,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(bottom=0)
        marked = _mark_deep_third(axes, [figures["depth"][slug] for slug in slugs])
    said = ["Grey: the deep third."] if marked else []
    said += ["Sites without a choice of sources are left out."] if shares else []
    note(figure, figures, " ".join([*said, "Mean over seeds."] if max(figures["seeds"].values()) > 1 else said))
    return figure


def quality(figures: Figures) -> Figure:
    """A point for each series, with a bar for its seeds."""
    figure, drawn = panels(figures, 2, share_y=True, shown_as="o")
    costs = {"speed": "speed (right is faster)", "memory": "peak memory (left is smaller)"}
    every = styles(figures)
    cells = [(slugs, *one) for slugs, axes in drawn for one in zip(axes, costs.items(), strict=True)]
    for slugs, axes, (key, title) in cells:
        axes.axvline(1, color="#bbbbbb", linewidth=0.8)
        for slug in slugs:
            style, point = every[slug], figures["quality"][slug]
            if point[key] is None:
                continue
            bits = point["bits_per_byte"]
            axes.vlines(point[key], bits["low"], bits["high"], color=style.colour, linewidth=1.6)
            axes.plot(point[key], bits["mean"], linestyle="", marker=style.marker, markersize=7, color=style.colour)
        axes.set_title(title)
        axes.set_xlabel("times the baseline's")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
        axes.margins(0.12)
    for _, (first, *_) in drawn:
        first.set_ylabel("bits per byte (lower is better)")
    band = f"Bar: {figures['band']}. " if max(figures["seeds"].values()) > 1 else ""
    note(figure, figures, f"{band}Speed: training tokens per processor second.")
    return figure


def defined(figures: Figures, key: str) -> bool:
    """Whether any series has this number at any site."""
    return any(points_over_depth(depth, key)[0] for depth in figures["depth"].values())


def _mark_deep_third(axes: Axes, depths: Sequence[Record]) -> bool:
    """Shade it if all series have the same: models of several depths have several."""
    edges = {(depth["position"][depth["deep"].index(True)], depth["position"][-1]) for depth in depths}
    if len(edges) == 1:
        ((begin, end),) = edges
        axes.axvspan(begin - 0.25, end + 0.25, color="#f3f3f3", zorder=0, linewidth=0)
    return len(edges) == 1
