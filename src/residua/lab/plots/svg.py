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
ROWS_WIDTH, ROWS_MARGIN, ROWS_TOP, ROW = 480, 140, 16, 26
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
    across = _scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT)
    up = _scale(low, high, HEIGHT - BOTTOM, TOP, log=log)
    parts = [_text(LEFT, 15, chart.title, "title"), _text(WIDTH - RIGHT, HEIGHT - 6, chart.x_title, "tick end")]
    if chart.shaded:
        left, right = (across(x) for x in chart.shaded)
        parts.append(f'<rect class="shaded" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
                     f'height="{HEIGHT - TOP - BOTTOM}"/>')  # fmt: skip
    parts += _axes(across, up, ticks(min(xs), max(xs), 6), log_ticks(low, high) if log else ticks(low, high, 5), short)
    for value, name in chart.references:
        parts.append(f'<path class="reference" d="M{LEFT} {up(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(WIDTH - RIGHT, up(value) - 4, name, "tick end"))
    for line in chart.lines:
        parts.append(_line(line, across, up))
    return _svg(WIDTH, HEIGHT, parts, f"{chart.title}: {', '.join(line.name for line in chart.lines)}")


def _axes(
    across: Scale, up: Scale, xs: Sequence[float], ys: Sequence[float], name: Callable[[float], str]
) -> list[str]:
    """A grid line and a number for each of ys, and what `name` says of each of xs."""
    parts = []
    for tick in ys:
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, up(tick) + 4, short(tick), "tick end"))
    return [*parts, *(_text(across(tick), HEIGHT - BOTTOM + 16, name(tick), "tick middle") for tick in xs)]


def _widened(values: Sequence[float], share: float = 0.12) -> tuple[float, float]:
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
) -> str:
    """A map of rows by columns; None is what cannot be. Small maps have numbers, large ones have every n-th label."""
    rows, columns, cells = pooled(rows, columns, cells)
    known = [abs(value) for row in cells for value in row if value is not None]
    top = (max(known, default=0.0) if largest is None else largest) or 1.0
    numbered = len(rows) * len(columns) <= NUMBERED
    wide = 34.0 if numbered else max(3.0, min(20.0, 640 / len(columns)))
    high = 22.0 if numbered else max(3.0, min(16.0, 520 / len(rows)))
    margin = 8 + 6.2 * min(14, max(map(len, rows)))
    above = 16 + 5.8 * min(14, max(map(len, columns))) + (22 if heading else 0)
    parts = [_text(0, 14, heading, "title")] if heading else []
    if numbered:
        parts += [
            _numbered(value, margin + column * wide, above + row * high, (wide, high), top, signed)
            for row, values in enumerate(cells)
            for column, value in enumerate(values)
        ]
    else:
        parts.append(_paths(cells, (margin, above), (wide, high), top, signed))
    every_row, every_column = (max(1, math.ceil(11 / high)), max(1, math.ceil(15 / wide)))
    for row in range(0, len(rows), every_row):
        parts.append(_text(margin - 5, above + (row + 0.5) * high + 4, clipped(rows[row]), "tick end"))
    for column in range(0, len(columns), every_column):
        x, y = margin + (column + 0.5) * wide + 4, above - 6
        label = escape(clipped(columns[column]))
        parts.append(f'<text class="tick" transform="translate({x:.1f} {y:.1f})rotate(-60)">{label}</text>')
    width = max(margin + wide * len(columns) + 30, 7.6 * len(heading))
    return _svg(width, above + high * len(rows) + 6, parts, title)


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


def _numbered(value: float | None, x: float, y: float, size: tuple[float, float], largest: float, signed: bool) -> str:
    wide, high = size
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{high - 1:.1f}"'
    if value is None:
        return f'<rect class="none" {box}/>'
    colour = shade(value, largest, signed=signed)
    ink = "on-dark" if is_dark(colour) else "on-light"
    return f'<rect fill="{as_hex(colour)}" {box}/>' + _text(
        x + wide / 2 - 0.5, y + high / 2 + 3.5, f"{value:.2f}".replace("-0.00", "0.00"), f"cell {ink}"
    )


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


def forest(rows: Sequence[tuple[str, str, Record]]) -> str:
    """Differences from the baseline with their intervals: (style, name, difference)."""
    values = [value for _, _, gap in rows for value in (gap["mean"], gap["low"], gap["high"]) if value is not None]
    reach = max((abs(value) for value in values), default=0.0) * 1.15 or 1.0
    drawn = []
    for kind, name, gap in rows:
        bar = None if gap["low"] is None else (gap["low"], gap["high"])
        drawn.append(_Mark(kind, name, gap["mean"], bool(gap["significant"]), bar, f"{gap['mean']:+.4f}"))
    across, parts = _rows(drawn, -reach, reach, 0.0, lambda tick: f"{tick:+.3g}" if tick else "0")
    parts += [
        _text(across(-reach / 2), 10, "better", "tick middle"),
        _text(across(reach / 2), 10, "worse", "tick middle"),
    ]
    title = "Difference of the validation loss from the baseline, with 95 % intervals"
    return _svg(ROWS_WIDTH, _rows_height(rows), parts, title)


def marks(rows: Sequence[tuple[str, str, float, Sequence[float]]], title: str) -> str:
    """What was measured among what was predicted: (style, name, measured, predicted)."""
    low, high = _widened([1.0, *(value for *_, measured, ahead in rows for value in (measured, *ahead))], 0.08)
    drawn = [
        _Mark(kind, name, measured, True, (min(predicted), max(predicted)) if predicted else None, f"{measured:.2f}x")
        for kind, name, measured, predicted in rows
    ]
    across, parts = _rows(drawn, low, high, 1.0, lambda tick: f"{tick:g}x")
    for place, (kind, _, _, predicted) in enumerate(rows):
        y = ROWS_TOP + ROW * (place + 0.5)
        hollow = [f'<circle class="dot hollow" cx="{across(x):.1f}" cy="{y}" r="4"/>' for x in predicted]
        parts.append(f'<g class="{kind}">{"".join(hollow)}</g>')
    return _svg(ROWS_WIDTH, _rows_height(rows), parts, title)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point on a row of its own, with a bar behind it."""

    style: str
    name: str
    value: float
    filled: bool
    bar: tuple[float, float] | None
    said: str


def _rows(
    drawn: Sequence[_Mark], low: float, high: float, zero: float, text: Callable[[float], str]
) -> tuple[Scale, list[str]]:
    across = _scale(low, high, ROWS_MARGIN, ROWS_WIDTH - 16)
    bottom = ROWS_TOP + ROW * len(drawn)
    parts = []
    for tick in ticks(low, high, 5):
        parts.append(f'<path class="grid" d="M{across(tick):.1f} {ROWS_TOP}V{bottom}"/>')
        parts.append(_text(across(tick), bottom + 15, text(tick), "tick middle"))
    parts.append(f'<path class="zero" d="M{across(zero):.1f} {ROWS_TOP}V{bottom}"/>')
    for place, mark in enumerate(drawn):
        y = ROWS_TOP + ROW * (place + 0.5)
        bar = (
            ""
            if mark.bar is None
            else f'<path class="whisker" d="M{across(mark.bar[0]):.1f} {y}H{across(mark.bar[1]):.1f}"/>'
        )
        dot = f'<circle class="dot{"" if mark.filled else " hollow"}" cx="{across(mark.value):.1f}" cy="{y}" r="5"/>'
        parts.append(_text(ROWS_MARGIN - 10, y + 4, clipped(mark.name, 20), "label end"))
        parts.append(f'<g class="{mark.style}"><title>{escape(f"{mark.name}: {mark.said}")}</title>{bar}{dot}</g>')
    return across, parts


def _rows_height(rows: Sequence[object]) -> float:
    return ROWS_TOP + ROW * len(rows) + 24


def points(rows: Sequence[tuple[str, str, float, Record]], x_title: str, y_title: str, title: str) -> str:
    """Quality against cost: (style, name, x, band of y)."""
    xs, bands = [x for _, _, x, _ in rows], [band for *_, band in rows]
    low, high = _widened([value for band in bands for value in (band["low"], band["high"])])
    left, right = _widened([*xs, 1.0])
    across, up = _scale(left, right, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        _text(LEFT, 15, title, "title"),
        _text(WIDTH - RIGHT, HEIGHT - 6, x_title, "tick end"),
        f'<path class="zero" d="M{across(1):.1f} {TOP}V{HEIGHT - BOTTOM}"/>',
    ]
    parts += _axes(across, up, ticks(left, right, 5), ticks(low, high, 5), lambda tick: f"{tick:g}x")
    for kind, name, x, band in rows:
        bar = f'<path class="whisker" d="M{across(x):.1f} {up(band["low"]):.1f}V{up(band["high"]):.1f}"/>'
        dot = f'<circle class="dot" cx="{across(x):.1f}" cy="{up(band["mean"]):.1f}" r="5"/>'
        said = f"{name}: {x:g}x, {band['mean']:.4f} {y_title}"
        parts.append(f'<g class="{kind}"><title>{escape(said)}</title>{bar}{dot}</g>')
    return _svg(WIDTH, HEIGHT, parts, f"{title}: {y_title} against {x_title}")


def stacked(rows: Sequence[str], shares: Sequence[tuple[str, str, Sequence[float | None]]], title: str) -> str:
    """Parts of a whole, a bar a row: (style, name, shares by row)."""
    margin, width, step = 90, 560, max(6.0, min(22.0, 520 / len(rows)))
    every = max(1, math.ceil(11 / step))
    parts = []
    for place, row in enumerate(rows):
        y, x = 4 + step * place, float(margin)
        if place % every == 0:
            parts.append(_text(margin - 6, y + step / 2 + 4, clipped(row), "tick end"))
        for kind, name, values in shares:
            size = (values[place] or 0.0) * (width - margin - 10)
            if size:
                parts.append(f'<rect class="fill {kind}" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" '
                             f'height="{step - 1.5:.1f}"><title>{escape(f"{row}: {name} {values[place]:.3f}")}</title>'
                             "</rect>")  # fmt: skip
            x += size
    return _svg(width, 8 + step * len(rows), parts, title)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Some `count` round numbers between two."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    decade = 10.0 ** math.floor(math.log10(raw))
    step = next(decade * size for size in (1, 2, 2.5, 5, 10) if decade * size >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times the powers of ten between two, or the powers alone."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    sizes = (1, 2, 5) if high / low < 200 else (1,)
    found = [float(f"{size * 10.0**decade:.3g}") for decade in decades for size in sizes]
    return [value for value in found if low <= value <= high]


def clipped(name: str, most: int = 14) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"


def _scale(low: float, high: float, start: float, end: float, *, log: bool = False) -> Scale:
    bend = math.log if log else float
    bottom, top = bend(low), bend(high)
    return lambda value: start + (bend(value) - bottom) / ((top - bottom) or 1.0) * (end - start)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    box = f'width="{width:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="figure" role="img" {box} aria-label="{escape(title)}">{"".join(parts)}</svg>'
