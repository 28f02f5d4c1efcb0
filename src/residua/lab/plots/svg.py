"""The pictures of a page as static SVG: what is read without JavaScript, printed, and put into the documentation.

No colour is written for a series, only its class: `figure.css` gives it one for light and one for dark. Everything that
comes from a run is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from residua.lab.common.files import Record
from residua.lab.common.tables import short
from residua.lab.plots.colour import as_hex, is_dark, shade

Scale = Callable[[float], float]
"""From a number to its place on the picture."""

STYLE = Path(__file__).with_name("figure.css").read_text()
WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 40
LEVELS = 48
"""Colours of a map without numbers: cells of one colour are one path, which keeps a large map small."""
MOST_CELLS = 5000
"""Of a static map; a larger one is drawn in blocks, each the mean of its cells."""
NUMBERED = 200
"""Maps up to this many cells have their numbers written in."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; None in ys is a gap, low and high are its band."""

    style: str
    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn on a pair of axes."""

    title: str
    x_title: str
    lines: Sequence[Line]
    share: bool = False
    """From 0 to 1."""
    shaded: tuple[float, float] | None = None
    references: Sequence[tuple[float, str]] = field(default_factory=list)
    whole: bool = False
    """Only whole numbers are named on the x axis: there is no block 1.5."""
    names: Sequence[str] = ()
    """What 0, 1, 2, ... on the x axis are called, where they are no numbers."""


def style(series: Record) -> str:
    """The classes of a series: its colour and its dash."""
    return f"c-{series['colour']} d{series['dash']}"


def lines(chart: Chart) -> str:
    """A line chart; positive values over a wide range are drawn on a log scale."""
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for part in (line.ys, line.low, line.high) for y in part or () if y is not None]
    ys += [value for value, _ in chart.references]
    if not xs or not ys:
        return ""
    log = not chart.share and min(ys) > 0 and max(ys) > 8 * min(ys)
    low, high = (0.0, 1.0) if chart.share else (min(ys), max(ys)) if log else (min(0.0, min(ys)), max(ys))
    if min(ys) > 0.5 * high and not chart.share and not log:
        low = min(ys) - 0.08 * (high - min(ys) or high)
    high = high if high > low else low + 1
    first, last = (0, len(chart.names) - 1) if chart.names else (min(xs), max(xs))
    room = 18 if chart.names else 0  # a name stands on both sides of its place
    across = scale(first, last if last > first else first + 1, LEFT + room, WIDTH - RIGHT - room)
    up = scale(low, high, HEIGHT - BOTTOM, TOP, log=log)
    title = f"{chart.title} (log scale)" if log else chart.title
    parts = [text(LEFT, 15, title, "title"), text(WIDTH - RIGHT, HEIGHT - 6, chart.x_title, "tick end")]
    if chart.shaded:
        left, right = (across(x) for x in chart.shaded)
        parts.append(f'<rect class="shaded" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
                     f'height="{HEIGHT - TOP - BOTTOM}"/>')  # fmt: skip
    named = range(len(chart.names)) if chart.names else ticks(min(xs), max(xs), 6, whole=chart.whole)
    parts += _axes(
        across, up, named, log_ticks(low, high) if log else ticks(low, high, 5),
        lambda place: chart.names[int(place)] if chart.names else short(place),
    )  # fmt: skip
    for value, name in chart.references:
        parts.append(f'<path class="reference" d="M{LEFT} {up(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(WIDTH - RIGHT, up(value) - 4, name, "tick end"))
    for line in chart.lines:
        parts.append(_line(line, across, up))
    return framed(WIDTH, HEIGHT, parts, f"{chart.title}: {', '.join(line.name for line in chart.lines)}")


def _axes(
    across: Scale, up: Scale, xs: Sequence[float], ys: Sequence[float], name: Callable[[float], str]
) -> list[str]:
    """A grid line and a number for each of ys, and what `name` says of each of xs."""
    parts = []
    for tick in ys:
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 6, up(tick) + 4, short(tick), "tick end"))
    return [*parts, *(text(across(tick), HEIGHT - BOTTOM + 16, name(tick), "tick middle") for tick in xs)]


def widened(values: Sequence[float], share: float = 0.12) -> tuple[float, float]:
    """From the lowest to the highest, with room on both sides."""
    room = share * (max(values) - min(values)) or 0.05
    return min(values) - room, max(values) + room


def _line(line: Line, across: Scale, up: Scale) -> str:
    parts = []
    if line.low is not None and line.high is not None and list(line.low) != list(line.high):
        there = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(line.xs, line.high, strict=True)]
        back = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(line.xs, line.low, strict=True)]
        parts.append(f'<path class="band" d="M{"L".join([*there, *reversed(back)])}Z"/>')
    points = [(across(x), up(y)) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    if points:
        parts.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    if line.dots or len(points) == 1:
        parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
    return f'<g class="{line.style}"><title>{escape(line.name)}</title>{"".join(parts)}</g>'


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    title: str,
    *,
    signed: bool = False,
    largest: float | None = None,
    heading: str = "",
    digits: int = 2,
) -> str:
    """A map of rows by columns; None is what cannot be. Small maps have numbers, large ones have every n-th label."""
    rows, columns, cells = pooled(rows, columns, cells)
    known = [abs(value) for row in cells for value in row if value is not None]
    top = (max(known, default=0.0) if largest is None else largest) or 1.0
    numbered = len(rows) * len(columns) <= NUMBERED
    wide = 22.0 + 6.0 * digits if numbered else max(3.0, min(20.0, 640 / len(columns)))
    high = 22.0 if numbered else max(3.0, min(16.0, 520 / len(rows)))
    margin = 8 + 6.2 * min(14, max(map(len, rows)))
    above = 16 + 5.8 * min(14, max(map(len, columns))) + (22 if heading else 0)
    parts = [text(0, 14, heading, "title")] if heading else []
    if numbered:
        parts += [
            _numbered(value, margin + column * wide, above + row * high, (wide, high), top, signed, digits)
            for row, values in enumerate(cells)
            for column, value in enumerate(values)
        ]
    else:
        parts.append(_paths(cells, (margin, above), (wide, high), top, signed))
    every_row, every_column = (max(1, math.ceil(11 / high)), max(1, math.ceil(15 / wide)))
    for row in range(0, len(rows), every_row):
        parts.append(text(margin - 5, above + (row + 0.5) * high + 4, clipped(rows[row]), "tick end"))
    for column in range(0, len(columns), every_column):
        x, y = margin + (column + 0.5) * wide + 4, above - 6
        label = escape(clipped(columns[column]))
        parts.append(f'<text class="tick" transform="translate({x:.1f} {y:.1f})rotate(-60)">{label}</text>')
    width = max(margin + wide * len(columns) + 30, 8.4 * len(heading))
    return framed(width, above + high * len(rows) + 6, parts, title)


def ramp(largest: float, *, signed: bool = False, unit: str = "") -> str:
    """What the colours of a map mean, as a piece of HTML: from 0, or minus the largest, to the largest."""
    steps, bars = 24, []
    for place in range(steps):
        root = 2 * place / (steps - 1) - 1 if signed else place / (steps - 1)
        colour = as_hex(shade(math.copysign(root * root, root) * largest, largest, signed=signed))
        bars.append(f'<rect x="{place}" width="1.05" height="1" fill="{colour}"/>')
    low, high = (f"{value:.3g}" for value in ((-largest if signed else 0.0), largest))
    said = f"{unit}, square-root scale" if unit else "square-root scale"
    return (
        f'<div class="ramp"><span>{low}</span><svg viewBox="0 0 {steps} 1" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(bars)}</svg><span>{high}</span><span>{escape(said)}</span></div>'
    )


def pooled(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]]
) -> tuple[Sequence[str], Sequence[str], Sequence[Sequence[float | None]]]:
    """The map in blocks of the smallest size that bounds it, named after their first row and column."""
    side = 1
    while math.ceil(len(rows) / side) * math.ceil(len(columns) / side) > MOST_CELLS:
        side += 1
    if side == 1:
        return rows, columns, cells

    def mean(row: int, column: int) -> float | None:
        block = [value for part in cells[row : row + side] for value in part[column : column + side]]
        known = [value for value in block if value is not None]
        return math.fsum(known) / len(known) if known else None

    starts = range(0, len(rows), side), range(0, len(columns), side)
    return rows[::side], columns[::side], [[mean(row, column) for column in starts[1]] for row in starts[0]]


def _numbered(
    value: float | None, x: float, y: float, size: tuple[float, float], largest: float, signed: bool, digits: int
) -> str:
    wide, high = size
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{high - 1:.1f}"'
    if value is None:
        return f'<rect class="none" {box}/>'
    colour = shade(value, largest, signed=signed)
    ink = "on-dark" if is_dark(colour) else "on-light"
    return f'<rect fill="{as_hex(colour)}" {box}/>' + text(
        x + wide / 2 - 0.5, y + high / 2 + 3.5, rounded_text(value, digits), f"cell {ink}"
    )


def rounded_text(value: float, digits: int) -> str:
    """A number without a negative zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _paths(
    cells: Sequence[Sequence[float | None]],
    corner: tuple[float, float],
    size: tuple[float, float],
    largest: float,
    signed: bool,
) -> str:
    """The cells in cell units, one path a colour."""
    found: dict[str, list[str]] = {}
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if value is None:
                continue
            root = math.copysign(math.sqrt(min(1.0, abs(value) / largest)), value)
            level = round(root * LEVELS) / LEVELS
            colour = as_hex(shade(math.copysign(level * level, level) * largest, largest, signed=signed))
            found.setdefault(colour, []).append(f"M{column} {row}h1v1h-1z")
    (x, y), (wide, high) = corner, size
    paths = "".join(f'<path fill="{colour}" d="{"".join(found[colour])}"/>' for colour in sorted(found))
    rows, columns = len(cells), max(map(len, cells))
    behind = f'<rect class="none" width="{columns}" height="{rows}"/>'
    return f'<g transform="translate({x:.1f} {y:.1f})scale({wide:.3f} {high:.3f})">{behind}{paths}</g>'


def points(rows: Sequence[tuple[str, str, float, Record]], x_title: str, y_title: str, title: str) -> str:
    """Quality against cost: (style, name, x, band of y)."""
    xs, bands = [x for _, _, x, _ in rows], [band for *_, band in rows]
    low, high = widened([value for band in bands for value in (band["low"], band["high"])])
    left, right = widened([*xs, 1.0])
    across, up = scale(left, right, LEFT, WIDTH - RIGHT), scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        text(LEFT, 15, title, "title"),
        text(WIDTH - RIGHT, HEIGHT - 6, x_title, "tick end"),
        f'<path class="zero" d="M{across(1):.1f} {TOP}V{HEIGHT - BOTTOM}"/>',
    ]
    parts += _axes(across, up, ticks(left, right, 5), ticks(low, high, 5), lambda tick: f"{tick:g}x")
    for kind, name, x, band in rows:
        bar = f'<path class="whisker" d="M{across(x):.1f} {up(band["low"]):.1f}V{up(band["high"]):.1f}"/>'
        dot = f'<circle class="dot" cx="{across(x):.1f}" cy="{up(band["mean"]):.1f}" r="5"/>'
        said = f"{name}: {x:g}x, {band['mean']:.4f} {y_title}"
        parts.append(f'<g class="{kind}"><title>{escape(said)}</title>{bar}{dot}</g>')
    return framed(WIDTH, HEIGHT, parts, f"{title}: {y_title} against {x_title}")


def stacked(rows: Sequence[str], shares: Sequence[tuple[str, str, Sequence[float | None]]], title: str) -> str:
    """Parts of a whole, a bar a row: (style, name, shares by row)."""
    margin, width, step = 90, 560, max(6.0, min(22.0, 520 / len(rows)))
    every = max(1, math.ceil(11 / step))
    parts = []
    for place, row in enumerate(rows):
        y, x = 4 + step * place, float(margin)
        if place % every == 0:
            parts.append(text(margin - 6, y + step / 2 + 4, clipped(row), "tick end"))
        for kind, name, values in shares:
            size = (values[place] or 0.0) * (width - margin - 10)
            if size:
                parts.append(f'<rect class="fill {kind}" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" '
                             f'height="{step - 1.5:.1f}"><title>{escape(f"{row}: {name} {values[place]:.3f}")}</title>'
                             "</rect>")  # fmt: skip
            x += size
    return framed(width, 8 + step * len(rows), parts, title)


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Some `count` round numbers between two; whole ones only, if they must be."""
    if not high > low:
        return [low]
    raw = max((high - low) / count, 1.0 if whole else 0.0)
    decade = 10.0 ** math.floor(math.log10(raw))
    sizes = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(decade * size for size in sizes if decade * size >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times the powers of ten between two, or the powers alone; where there is at most one, round numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    sizes = (1, 2, 5) if high / low < 200 else (1,)
    found = [float(f"{size * 10.0**decade:.3g}") for decade in decades for size in sizes]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else ticks(low, high, 5)


def clipped(name: str, most: int = 14) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"


def scale(low: float, high: float, start: float, end: float, *, log: bool = False) -> Scale:
    """From the numbers between low and high to the places between start and end."""
    bend = math.log if log else float
    bottom, top = bend(low), bend(high)
    return lambda value: start + (bend(value) - bottom) / ((top - bottom) or 1.0) * (end - start)


def text(x: float, y: float, said: str, kind: str) -> str:
    """Escaped, at a place, in a class."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(said)}</text>'


def framed(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """The parts as a picture with a name."""
    box = f'width="{width:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="figure" role="img" {box} aria-label="{escape(title)}">{"".join(parts)}</svg>'
