"""One look for all plots: the palette, the settings, and the colour, dash and marker of a series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from residua.lab.common.files import Record
from residua.lab.plots.parted import by_size

Figures = Record
"""What `residua.lab.figures.collect` gives."""

Dash = Literal["-"] | tuple[int, tuple[float, ...]]
"""As matplotlib takes it."""

OKABE_ITO: Mapping[str, str] = {
    "black": "#000000",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
}
CYCLE = ("blue", "vermillion", "green", "purple", "orange", "sky")
"""Yellow is left out: a thin line of it cannot be seen on white."""
DASHES: tuple[Dash, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MARKERS = "osD^vP"

GREY, PALE = "#666666", "#ececec"

SETTINGS: Mapping[Any, Any] = {
    "figure.dpi": 150,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a label is a spec, never a formula
    "svg.hashsalt": "residua",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw under our settings, whatever the user's own are."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        yield


@dataclass(frozen=True, slots=True)
class Style:
    """How a series looks, in every plot."""

    colour: str
    dash: Dash
    marker: str


def styles(figures: Figures) -> dict[str, Style]:
    """The look of every series, by slug; a design looks the same at every size."""
    baselines = {each["baseline"] for each in figures["quality"].values()}
    found: dict[str, Style] = {}
    black = others = 0
    names = {slug: name for rows in by_size(figures["labels"]).values() for slug, name in rows.items()}
    for slug, name in names.items():
        if name in found:
            continue
        if slug in baselines:
            found[name] = Style(OKABE_ITO["black"], DASHES[black % len(DASHES)], MARKERS[black % len(MARKERS)])
            black += 1
        else:
            turn, colour = divmod(others, len(CYCLE))
            found[name] = Style(OKABE_ITO[CYCLE[colour]], DASHES[turn % len(DASHES)], MARKERS[turn % len(MARKERS)])
            others += 1
    return {slug: found[name] for slug, name in names.items()}


def look_of(figures: Figures, slug: str) -> dict[str, Any]:
    """The colour and the dash of a series, as the style sheet names them."""
    style, names = styles(figures)[slug], {value: name for name, value in OKABE_ITO.items()}
    return {"colour": names[style.colour], "dash": DASHES.index(style.dash)}


def points_over_depth(depth: Record, key: str) -> tuple[list[float], list[float]]:
    """Where a number over depth is defined, and its values there."""
    pairs = [(x, y) for x, y in zip(depth["position"], depth[key], strict=True) if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]
