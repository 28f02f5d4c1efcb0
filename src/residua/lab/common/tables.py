"""Tables: the cells that several of them share, and the same cells on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from residua.lab.common.files import Record
from residua.lab.common.stats import ALPHA

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = """
.residua { color-scheme: light dark; font: 0.85rem/1.45 system-ui, sans-serif; overflow-x: auto; }
.residua table { border-collapse: collapse; color: light-dark(#1b1b1b, #e8e8e8); background: light-dark(#fff, #111); }
.residua th, .residua td { padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid light-dark(#dddddd, #3a3d45); }
.residua th:first-child, .residua td:first-child { text-align: left; font-family: ui-monospace, monospace; }
.residua p { color: light-dark(#555555, #a8a8a8); max-width: 90ch; margin: 0.4rem 0; }
"""


def confidence(results: Record) -> str:
    """`95 %`, the level of the intervals: higher where seeds were looked at more than once."""
    judged = results.get("statistics", {})  # earlier versions say nothing, and had one look
    return f"{100 * (1 - judged.get('alpha', ALPHA) / judged.get('looks', 1)):.4g} %"


def mde(rows: int | None) -> str:
    """What MDE stands for: found among so many rows judged together, or for each by itself."""
    whose = "for a row judged by itself" if rows is None else f"among {count(rows, 'row')}"
    return (
        "MDE: the minimum detectable effect, the smallest true difference found with 80 % power by these seeds, "
        f"{whose}"
    )


def spread(value: Record, digits: int) -> str:
    """`1.2345 +- 0.0012`, or the bare mean of one seed."""
    mean = f"{value['mean']:.{digits}f}"
    return mean if value["deviation"] is None else f"{mean} +- {value['deviation']:.{digits}f}"


def difference(row: Record, digits: int = 4, unclear: str = "n.s.") -> str:
    """`-0.041 [-0.06, -0.02]`; inside the noise `+0.01 n.s.` with the minimum detectable effect; below three seeds the
    bare mean."""
    gap = row["difference"]
    if gap is None:
        return "baseline"
    mean = f"{gap['mean']:+.{digits}f}"
    if gap["low"] is None:
        return f"{mean} (no interval)"
    if gap["significant"]:
        return f"{mean} [{gap['low']:+.{digits}f}, {gap['high']:+.{digits}f}]"
    return f"{mean} {unclear} (MDE {gap['detectable']:.{digits}f})"


def rates(found: Record, own_parameters: int) -> str:
    """`0.008`, or `0.008 / 0.016` where the design's own parameters, if it has any, learn at another."""
    lr, own = found["lr"], found["residual_lr"]
    return f"{lr:g}" if own == lr or not own_parameters else f"{lr:g} / {own:g}"


def count(number: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def times(value: float | None) -> str:
    """`1.25x`, or a dash where nothing is known."""
    return "-" if value is None else f"{value:.2f}x"


def short(value: float) -> str:
    """1500000 as 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def terminal(width: int = 220) -> Console:
    """Where to print plain text: the terminal, or a file or a pipe of `width` columns."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    below: Sequence[str] = (),
    notes: Sequence[str] = (),
    *,
    left: Sequence[str] = (),
    width: int = 220,
    title: str | None = None,
) -> None:
    """Print a table to `terminal(width)`.

    below: lines under it. notes: what a reader must not miss, each after a `!`.
    left:  titles of the columns that are aligned to the left; the first by default.
    """
    from rich import box
    from rich.table import Table

    console = terminal(width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="")
    for column in titles:
        aligned = column in (left or titles[:1])
        table.add_column(column, justify="left" if aligned else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in below:
        console.print(line, style="dim")
    for note in notes:
        console.print(f"! {note}")


def markdown_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The table for a page of Markdown."""
    titles = list(titles)
    return "\n".join(
        ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *("| " + " | ".join(row) + " |" for row in rows)]
    )


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]], below: Sequence[str] = ()) -> str:
    """The table for a notebook: one piece of HTML with its style, light or dark as the page is, every text escaped."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    lines = "".join(f"<p>{escape(line)}</p>" for line in below)
    return (
        f'<div class="residua"><style>{_STYLE}</style>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}</div>"
    )
