"""The comparison as a terminal table, Markdown and CSV, all from the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]


def columns(results: Mapping[str, Any]) -> dict[str, Callable[[Row], str]]:
    """Title -> cell, for the columns that this comparison needs."""
    rows = results["rows"]
    found: dict[str, Callable[[Row], str]] = {
        "design": lambda row: row["label"],
        "params": lambda row: f"{row['parameters']:,}",
        "val loss": lambda row: spread(row["loss"], 4),
        "perplexity": lambda row: spread(row["perplexity"], 2),
        "bits/byte": lambda row: spread(row["bits_per_byte"], 4),
        "vs baseline": difference,
        "equal time": lambda row: f"{row['loss_at_equal_time']['mean']:.4f}",
        "lr": lambda row: _rates(row),
        "speed": lambda row: f"{row['speed']:.2f}x",
        "memory": lambda row: f"{row['memory']:.2f}x",
    }
    if any(row["routing"]["max_weight"] is not None for row in rows):
        found |= {
            "max w": lambda row: _routed(row, "max_weight"),
            "entropy": lambda row: _routed(row, "normalised_entropy"),
            "eff n": lambda row: _routed(row, "effective_sources", 1),
            "collapsed": lambda row: _routed(row, "collapsed_share"),
        }
    return found


def difference(row: Row, digits: int = 4, unclear: str = "n.s.") -> str:
    """`-0.041 [-0.06, -0.02]`, `+0.01 n.s.` with what could have been seen, or the bare mean below three seeds."""
    gap = row["difference"]
    if gap is None:
        return "baseline"
    mean = f"{gap['mean']:+.{digits}f}"
    if gap["low"] is None:
        return f"{mean} (no interval)"
    if gap["significant"]:
        return f"{mean} [{gap['low']:+.{digits}f}, {gap['high']:+.{digits}f}]"
    return f"{mean} {unclear} (sees {gap['detectable']:.{digits}f})"


def spread(value: Mapping[str, Any], digits: int) -> str:
    """`1.2345 +- 0.0012`, or the bare mean of one seed."""
    mean = f"{value['mean']:.{digits}f}"
    return mean if value["deviation"] is None else f"{mean} +- {value['deviation']:.{digits}f}"


def legend(results: Mapping[str, Any]) -> str:
    """What the columns mean, in as few lines as will do."""
    match = results["plan"]["match"]
    lines = [
        f"val loss: nats per token, mean +- standard deviation over {len(results['plan']['seeds'])} seeds. "
        "vs baseline: mean paired difference with its 95 % t interval;",
        "n.s.: the interval holds zero; sees: the smallest difference that these seeds would have found 4 times of 5.",
        "equal time: loss when the fastest row was done, others in mid-schedule. speed: tokens per CPU second, and "
        "peak memory, over the baseline's;",
        "speed is rough (the runs are not interleaved; repeats on a shared machine differed by up to 30 %).",
        f"matched on: {match if match != 'none' else 'nothing; see params'}. max w, entropy (0..1), eff n, collapsed: "
        "routing over all sites / the deep third.",
    ]
    return "\n".join(lines)


def to_markdown(results: Mapping[str, Any]) -> str:
    """A Markdown table with its notes."""
    cells = columns(results)
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    for row in results["rows"]:
        shown = [show(row).replace("|", "\\|") for show in cells.values()]
        shown[0] = f"`{shown[0]}`"
        lines.append("| " + " | ".join(shown) + " |")
    lines += ["", legend(results).replace("\n", " "), *(f"- {note}" for note in results["notes"])]
    return "\n".join(lines) + "\n"


def to_csv(results: Mapping[str, Any]) -> str:
    """One line a row, plain numbers, for a spreadsheet."""
    flat = [_flat(row) for row in results["rows"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def show(results: Mapping[str, Any]) -> None:
    """Print the table to the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 220
    cells = columns(results)
    if console.width < 150:
        for title in ("perplexity", "equal time", "eff n", "collapsed"):
            cells.pop(title, None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in cells:
        table.add_column(title, justify="left" if title == "design" else "right", overflow="fold")
    for row in results["rows"]:
        table.add_row(*(cell(row) for cell in cells.values()))
    console.print(table)
    console.print(legend(results), style="dim")
    for note in results["notes"]:
        console.print(f"! {note}")


def _rates(row: Row) -> str:
    lr, own = row["rates"]["lr"], row["rates"]["residual_lr"]
    shown = f"{lr:g}" if own == lr or not row["stream_parameters"] else f"{lr:g} / {own:g}"
    return shown + ("!" if row["edge"] else "")


def _routed(row: Row, key: str, digits: int = 2) -> str:
    values = row["routing"][key], row["routing"][f"deep_{key}"]
    return "-" if None in values else " / ".join(f"{value:.{digits}f}" for value in values)


def _flat(row: Row) -> dict[str, Any]:
    flat = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    for key in ("loss", "perplexity", "bits_per_byte", "loss_at_equal_time"):
        flat |= {f"{key}_mean": row[key]["mean"], f"{key}_deviation": row[key]["deviation"]}
    flat.pop("difference", None)
    gap = row["difference"] or dict.fromkeys(("mean", "low", "high", "detectable", "significant"))
    flat |= {f"difference_{key}": gap[key] for key in ("mean", "low", "high", "detectable", "significant")}
    return flat | dict(row["rates"]) | dict(row["routing"])
