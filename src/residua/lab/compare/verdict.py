"""verdict(results, out): what a comparison found, what it did not, and the one command to type next, in plain words.

A row is significantly better or worse as the table says, which corrects for all of its rows (Holm); the numbers are
those of the table. The next command repeats the comparison with as many seeds as would decide the row that is nearest
to a decision, if its true difference is the one seen here:

    detectable(n) = found_at(level, n - 1) s / sqrt(n) <= |mean|,    s from the detectable difference of these seeds

where level is that of Holm's first step, 5 % over the rows and looks.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from residua.lab.common.files import Record, Values
from residua.lab.common.stats import ALPHA, FEWEST, found_at

MOST_SEEDS = 12
"""What is asked for in a next command: with more, a larger model would be the better use of the time."""

MOST_NAMED = 6
"""Of rows without a verdict, those with the largest differences; the table has them all."""


def verdict(results: Record, out: Path | str) -> Values:
    """`found`, `unclear` and `next`, a sentence each (empty where there is nothing to say), and the `command`."""
    rows = [row for row in results["rows"] if row["difference"] is not None]
    base = _names([row for row in results["rows"] if row["baseline"]])
    judged = [row for row in rows if row["difference"]["significant"] is not None]
    seeds = len(results["plan"]["seeds"])
    if results.get("unfinished"):
        return _so_far(results, judged, base)
    if not judged:
        command = with_seeds(results["command"], out, FEWEST)
        why = f"With {FEWEST} seeds the differences can be judged:" if rows else ""
        found = (
            f"nothing is judged: {_counted(seeds)} give{'s' if seeds == 1 else ''} no interval."
            if rows
            else "there is nothing to compare with."
        )
        return {"found": found, "unclear": "", "next": why if command else "", "command": command if why else ""}
    clear = [row for row in judged if row["difference"]["significant"]]
    unclear = [row for row in judged if not row["difference"]["significant"]]
    return {
        "found": _found(clear, base, _seeds(judged), _interval(results)),
        "unclear": _unclear(unclear, base, _seeds(judged)),
        **_next(results, unclear, out, max(row["difference"]["seeds"] for row in judged)),
    }


def _so_far(results: Record, judged: Sequence[Record], base: str) -> Values:
    """The same of a comparison that has not ended; what comes next is the rest of it."""
    left = results["unfinished"]
    clear = [row for row in judged if row["difference"]["significant"]]
    unclear = [row for row in judged if not row["difference"]["significant"]]
    words = [word for word in shlex.split(results["command"]) if word != "--so-far"]
    seeds = _seeds(judged) if judged else ""
    found = (
        _found(clear, base, seeds, _interval(results))
        if judged
        else f"nothing is judged yet: no row has {FEWEST} seeds."
    )
    return {
        "found": f"so far, {found}",
        "unclear": _unclear(unclear, base, seeds),
        "next": f"{left['runs']} of {left['of']} runs are there; the rest:" if words else "",
        "command": shlex.join(words),
    }


def lines(told: Record) -> list[str]:
    """The verdict for a terminal."""
    shown = [f"Found: {told['found']}"]
    if told["unclear"]:
        shown.append(f"Not significant: {told['unclear']}")
    if told["command"]:
        shown += [f"Next: {told['next']}", f"  {told['command']}"]
    return shown


def in_words(gap: Record | None) -> str:
    """A difference from the baseline for a reader without statistics: better or worse by how much, or unclear."""
    if gap is None:
        return "the baseline"
    if gap["significant"] is None:
        return f"{gap['mean']:+.4f}, not judged"
    if not gap["significant"]:
        return f"not significant ({gap['mean']:+.4f}; minimum detectable effect {gap['detectable']:.4f})"
    low, high = sorted((abs(gap["low"]), abs(gap["high"])))
    return f"{'better' if gap['mean'] < 0 else 'worse'} by {abs(gap['mean']):.4f} ({low:.4f} to {high:.4f})"


def detectable(row: Record, seeds: int, level: float = ALPHA) -> float:
    """The smallest true difference of a row that so many seeds would find, from the spread that these showed.

    level: at which the seeds that are there were judged, and those to come are.
    """
    gap = row["difference"]
    return gap["detectable"] * _reach(seeds, level) / _reach(gap["seeds"], level)


def _reach(seeds: int, level: float) -> float:
    return found_at(level, seeds - 1) / math.sqrt(seeds)


def _statistics(results: Record) -> Record:
    """How it was judged; results of earlier versions row by row."""
    return {"alpha": ALPHA, "mde_rows": 1, "looks": 1, **results.get("statistics", {})}


def _interval(results: Record) -> str:
    """The name of its intervals."""
    judged = _statistics(results)
    return f"{100 * (1 - judged['alpha'] / judged['looks']):.4g} % interval"


def _found(rows: Sequence[Record], base: str, seeds: str, interval: str) -> str:
    said = []
    for word, sign in (("better", -1), ("worse", 1)):
        own = sorted((row for row in rows if row["difference"]["mean"] * sign > 0), key=_size)
        if own:
            gaps = [_gap(row, "" if place else interval) for place, row in enumerate(own)]
            said.append(f"significantly {word} than {base} ({seeds}): {_listed(gaps)}")
    if not said:
        return f"no row differs significantly from {base} ({seeds})."
    return "; ".join(said) + "."


def _unclear(rows: Sequence[Record], base: str, seeds: str) -> str:
    if not rows:
        return ""
    least, most = (bound(row["difference"]["detectable"] for row in rows) for bound in (min, max))
    sizes = f"{least:.3f}" if f"{least:.3f}" == f"{most:.3f}" else f"{least:.3f} to {most:.3f}"
    gaps = [f"{row['label']} ({row['difference']['mean']:+.3f})" for row in sorted(rows, key=_size)]
    if len(gaps) > MOST_NAMED:
        gaps[MOST_NAMED:] = [f"{len(gaps) - MOST_NAMED} more"]
    return f"{_listed(gaps)} against {base}; with {seeds} the minimum detectable effect is {sizes} nats (80 % power)."


def _next(results: Record, unclear: Sequence[Record], out: Path | str, seeds: int) -> Values:
    if not unclear:
        if any("after" in row for row in results["rows"]):  # of conversions, which have no page of their own
            return {"next": "", "command": ""}
        why = "What each source of each sublayer is worth:"
        return {"next": why, "command": shlex.join(["residua", "report", str(out), "--ablate"])}
    judged = _statistics(results)
    level = judged["alpha"] / max(judged["mde_rows"], 1) / judged["looks"]
    nearest = min(unclear, key=lambda row: row["difference"]["detectable"] / (abs(row["difference"]["mean"]) or 1e-12))
    seen = abs(nearest["difference"]["mean"])
    wanted = max(2 * seeds, FEWEST)
    if wanted > MOST_SEEDS:
        return {"next": "", "command": ""}
    while wanted < MOST_SEEDS and detectable(nearest, wanted, level) > seen:
        wanted += 1
    command = with_seeds(results["command"], out, wanted)
    why = (
        f"with {_counted(wanted)} the minimum detectable effect for {nearest['label']} would be "
        f"{detectable(nearest, wanted, level):.3f} nats:"
    )
    return {"next": why if command else "", "command": command}


def with_seeds(command: str, out: Path | str, seeds: int) -> str:
    """A typed `residua compare` with another number of seeds, into a directory of its own; empty if there is none."""
    words = [word for word in shlex.split(command) if word != "--so-far"]  # which would train nothing
    if words[:2] != ["residua", "compare"]:
        return ""
    kept, skip = [], False
    replaced = ("--seeds", "--out", "-o", "--until-resolved", "--most-seeds")
    for word in words:
        if not skip and word.split("=")[0] not in replaced:
            kept.append(word)
        skip = not skip and word in replaced
    return shlex.join([*kept, "--seeds", str(seeds), "--out", f"{str(out).rstrip('/')}-{seeds}-seeds"])


def _names(rows: Sequence[Record]) -> str:
    return rows[0]["label"] if len(rows) == 1 else "the baseline of its size"


def _size(row: Record) -> float:
    return -abs(row["difference"]["mean"])


def _gap(row: Record, interval: str) -> str:
    """By how much, and between what; the first of a sentence says of what kind its numbers are."""
    gap = row["difference"]
    low, high = sorted((abs(gap["low"]), abs(gap["high"])))
    unit, kind = (" nats per token", f"{interval} ") if interval else ("", "")
    return f"{row['label']} by {abs(gap['mean']):.3f}{unit} ({kind}{low:.3f} to {high:.3f})"


def _seeds(rows: Sequence[Record]) -> str:
    """How many seeds the differences of these rows are over."""
    counts = sorted({row["difference"]["seeds"] for row in rows})
    return _counted(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {_counted(counts[-1])}"


def _counted(seeds: int) -> str:
    return f"{seeds} seed{'' if seeds == 1 else 's'}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
