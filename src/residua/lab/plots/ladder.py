"""A ladder as pictures: the baseline's loss over compute with the curve through it, and what rows are worth in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from residua.lab.common.files import Record
from residua.lab.plots.rows import Mark, drawn
from residua.lab.plots.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    framed,
    log_ticks,
    scale,
    text,
    ticks,
    widened,
)

WIDTH = 720
STEPS = 60
AXES = {"per_token": "per token", "per_cpu_second": "per processor second"}


def curve(rungs: Sequence[Record], fitted: Record, rows: Sequence[tuple[str, str, float, float]]) -> str:
    """Loss over operations: the rungs, L = limit + scale C^-exponent, and rows as (style, name, operations, loss)."""
    known = [rung for rung in rungs if rung["compute"] is not None]
    if len(known) < 2:
        return ""
    xs = [rung["compute"] for rung in known] + [x for *_, x, _ in rows]
    low, high = widened([*(rung["loss"] for rung in known), *(loss for *_, loss in rows)])
    left, right = min(xs) / 1.2, max(xs) * 1.2
    across = scale(left, right, LEFT, WIDTH - RIGHT, log=True)
    up = scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        text(LEFT, 15, "validation loss over the sizes", "title"),
        text(WIDTH - RIGHT, HEIGHT - 6, "operations of one run (log scale)", "tick end"),
    ]
    for tick in ticks(low, high, 5):
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 6, up(tick) + 4, f"{tick:g}", "tick end"))
    for tick in log_ticks(left, right):
        parts.append(text(across(tick), HEIGHT - BOTTOM + 16, f"{tick:.0e}".replace("e+", "e"), "tick middle"))
    points = [left * (right / left) ** (step / STEPS) for step in range(STEPS + 1)]
    path = [(x, _loss(fitted, x)) for x in points]
    inside = [f"{across(x):.1f} {up(y):.1f}" for x, y in path if low <= y <= high]
    if len(inside) > 1:
        parts.append(f'<g class="c-black d1"><path class="line" d="M{"L".join(inside)}"/></g>')
    for rung in known:
        said = f"{rung['size']}: {rung['loss']:.4f}"
        parts.append(f'<g class="c-black d0">{_dot(across(rung["compute"]), up(rung["loss"]), said)}</g>')
    for style, name, x, loss in rows:
        parts.append(f'<g class="{style}">{_dot(across(x), up(loss), f"{name}: {loss:.4f}")}</g>')
    return framed(WIDTH, HEIGHT, parts, "Validation loss of the baseline over the sizes of the ladder")


def speedups(rows: Sequence[tuple[str, str, Record]], axis: str) -> str:
    """What every row is worth in the baseline's compute: (style, name, speedup); those without a bound are words."""
    found = [row for row in rows if row[2]["factor"] is not None]
    values = [value for *_, each in found for value in (each["factor"], each["low"], each["high"]) if value is not None]
    if not found:
        return ""
    low, high = min([1.0, *values]), max([1.0, *values])
    marks = [
        Mark(kind, name, math.log2(each["factor"]), in_words(each), bool(each["significant"]), _bar(each))
        for kind, name, each in found
    ]
    ends = widened([math.log2(low), math.log2(high)], 0.08)
    return drawn(marks, ends, 0.0, lambda tick: f"{2**tick:.3g}x", f"Effective speedup {AXES[axis]}")


def in_words(found: Record) -> str:
    """A speedup for a reader without statistics."""
    if found["factor"] is None:
        return "more than any compute would give the baseline"
    low, high = ("no bound" if found[key] is None else f"{found[key]:.2f}" for key in ("low", "high"))
    beyond = ", beyond the largest size" if found["extrapolated"] else ""
    unclear = "" if found["significant"] else "not significant: "
    return f"{unclear}{found['factor']:.2f} times ({low} to {high}){beyond}"


def _loss(fitted: Record, compute: float) -> float:
    return fitted["limit"]["value"] + fitted["scale"] * compute ** -fitted["exponent"]["value"]


def _bar(found: Record) -> tuple[float, float] | None:
    return None if None in (found["low"], found["high"]) else (math.log2(found["low"]), math.log2(found["high"]))


def _dot(x: float, y: float, said: str) -> str:
    return f'<title>{escape(said)}</title><circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
