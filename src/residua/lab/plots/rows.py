"""A point on a row of its own, with a bar behind it and words beside it: differences, and speeds.

Pieces of HTML that are as wide as their place: the marks of a row are at percentages, so that neither points nor text
are stretched, on a phone as on a screen. `rows.css` stands beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from residua.lab.common.files import Record
from residua.lab.plots.svg import scale, ticks, widened

STYLE = Path(__file__).with_name("rows.css").read_text()
HEIGHT = 22


@dataclass(frozen=True, slots=True)
class Mark:
    """One row."""

    style: str
    name: str
    value: float
    words: str
    filled: bool = True
    bar: tuple[float, float] | None = None
    beside: Sequence[float] = field(default_factory=tuple)
    """Hollow points on the same row."""


def forest(rows: Sequence[tuple[str, str, Record]]) -> str:
    """Differences from the baseline with their intervals: (style, name, difference); empty without any."""
    values = [value for _, _, gap in rows for value in (gap["mean"], gap["low"], gap["high"]) if value is not None]
    reach = max((abs(value) for value in values), default=0.0) * 1.08 or 1.0
    marks = [
        Mark(kind, name, gap["mean"], gap["words"], bool(gap["significant"]),
             None if gap["low"] is None else (gap["low"], gap["high"]))
        for kind, name, gap in rows
    ]  # fmt: skip
    title = "Difference of the validation loss from the baseline, with intervals"
    return drawn(marks, (-reach, reach), 0.0, lambda tick: f"{tick:+.3g}" if tick else "same loss", title)


def speeds(rows: Sequence[tuple[str, str, float, Sequence[float]]], title: str) -> str:
    """What was measured beside what was predicted: (style, name, measured, predicted)."""
    ends = widened([1.0, *(value for *_, measured, ahead in rows for value in (measured, *ahead))], 0.08)
    marks = [
        Mark(kind, name, measured, f"{measured:.2f}x", beside=predicted,
             bar=(min(predicted), max(predicted)) if predicted else None)
        for kind, name, measured, predicted in rows
    ]  # fmt: skip
    return drawn(marks, ends, 1.0, lambda tick: f"{tick:g}x", title)


def drawn(
    marks: Sequence[Mark], ends: tuple[float, float], zero: float, said: Callable[[float], str], title: str
) -> str:
    """The rows, and below them the axis from one end to the other, with a line at `zero`."""
    if not marks:
        return ""
    across = scale(*ends, 2.0, 98.0)
    named = ticks(*ends, 4)
    lines = [
        f'<line class="grid" x1="{across(tick):.2f}%" x2="{across(tick):.2f}%" y1="0" y2="100%"/>' for tick in named
    ]
    lines.append(f'<line class="zero" x1="{across(zero):.2f}%" x2="{across(zero):.2f}%" y1="0" y2="100%"/>')
    items = []
    for mark in marks:
        bar = "".join(
            f'<line class="whisker" x1="{across(low):.2f}%" x2="{across(high):.2f}%" y1="{HEIGHT // 2}" '
            f'y2="{HEIGHT // 2}"/>'
            for low, high in ([mark.bar] if mark.bar else [])
        )
        hollow = "".join(_dot(across(value), 4, filled=False) for value in mark.beside)
        dot = _dot(across(mark.value), 5, filled=mark.filled)
        items.append(
            f'<li class="{mark.style}"><bdi class="name">{escape(mark.name)}</bdi>'
            f'<svg class="figure" role="img" width="100%" height="{HEIGHT}" '
            f'aria-label="{escape(f"{mark.name}: {mark.words}")}">{"".join(lines)}{bar}{hollow}{dot}</svg>'
            f'<span class="words">{escape(mark.words)}</span></li>'
        )
    axis = "".join(
        f'<text class="tick middle" x="{across(tick):.2f}%" y="12">{escape(said(tick))}</text>' for tick in named
    )
    return (
        f'<ol class="rows" aria-label="{escape(title)}">{"".join(items)}'
        '<li class="axis" aria-hidden="true"><span></span>'
        f'<svg class="figure" width="100%" height="18">{axis}</svg><span></span></li></ol>'
    )


def _dot(x: float, radius: int, *, filled: bool) -> str:
    return f'<circle class="dot{"" if filled else " hollow"}" cx="{x:.2f}%" cy="{HEIGHT // 2}" r="{radius}"/>'
