"""The comparison as a terminal table, HTML, Markdown and CSV, all from the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import MDE, difference, html_table, print_table, spread, terminal, times


def columns(results: Record) -> dict[str, Callable[[Record], str]]:
    """Title -> cell, for the columns that this comparison needs."""
    rows = results["rows"]
    found: dict[str, Callable[[Record], str]] = {
        "design": lambda row: row["label"],
        "params": lambda row: f"{row['parameters']:,}",
        "val loss": lambda row: spread(row["loss"], 4),
        "perplexity": lambda row: spread(row["perplexity"], 2),
        "bits/byte": lambda row: spread(row["bits_per_byte"], 4),
        "vs baseline": difference,
        "equal time": lambda row: "-" if (at := row["loss_at_equal_time"]) is None else f"{at['mean']:.4f}",
        "lr": _rates,
        "speed": lambda row: times(row["speed"]),
        "memory": lambda row: times(row["memory"]),
    }
    if any(row["routing"]["max_weight"] is not None for row in rows):
        found |= {
            "max w": lambda row: _routed(row, "max_weight"),
            "entropy": lambda row: _routed(row, "normalised_entropy"),
            "eff n": lambda row: _routed(row, "effective_sources", 1),
            "collapsed": lambda row: _routed(row, "collapsed_share"),
        }
    for key in ("hardware", "build"):
        kinds = {row.get(key, "") for row in rows}  # results of earlier versions do not say
        if len(kinds) > 1 or any("; " in kind for kind in kinds):
            found[key] = lambda row, key=key: row.get(key, "")  # type: ignore[misc]
    return found


def legend(results: Record) -> str:
    """What the columns mean, in as few lines as will do."""
    match = results["plan"]["match"]
    lines = [
        f"val loss: nats per token, mean +- standard deviation over {len(results['plan']['seeds'])} seeds. "
        "vs baseline: mean paired difference with its 95 % t interval;",
        f"n.s.: not significant, the interval contains zero; {MDE} by these seeds.",
        "equal time: loss when the fastest row was done, others in mid-schedule. speed: tokens per CPU second, and "
        "peak memory, over the baseline's;",
        "speed is rough (the runs are not interleaved; repeats on a shared machine differed by up to 30 %).",
        f"matched on: {match if match != 'none' else 'nothing; see params'}. max w, entropy (0..1), eff n, collapsed: "
        "routing over all sites / the deep third.",
    ]
    return "\n".join(lines)


def to_markdown(results: Record) -> str:
    """A Markdown table with its notes."""
    cells = columns(results)
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    for row in results["rows"]:
        shown = [show(row).replace("|", "\\|") for show in cells.values()]
        shown[0] = f"`{shown[0]}`"
        lines.append("| " + " | ".join(shown) + " |")
    lines += ["", legend(results).replace("\n", " "), *(f"- {note}" for note in results["notes"])]
    return "\n".join(lines) + "\n"


def to_csv(results: Record) -> str:
    """One line a row, plain numbers, for a spreadsheet."""
    flat = [_flat(row) for row in results["rows"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def to_html(results: Record) -> str:
    """The table for a notebook, with its legend and notes."""
    cells = columns(results)
    rows = [[cell(row) for cell in cells.values()] for row in results["rows"]]
    return html_table(list(cells), rows, [legend(results).replace("\n", " "), *results["notes"]])


def show(results: Record) -> None:
    """Print the table to the terminal; a narrow one leaves some columns out."""
    cells = columns(results)
    if terminal().width < 150:
        for title in ("perplexity", "equal time", "eff n", "collapsed"):
            cells.pop(title, None)
    rows = [[cell(row) for cell in cells.values()] for row in results["rows"]]
    print_table(list(cells), rows, legend(results).split("\n"), results["notes"])


def _rates(row: Record) -> str:
    lr, own = row["rates"]["lr"], row["rates"]["residual_lr"]
    shown = f"{lr:g}" if own == lr or not row["stream_parameters"] else f"{lr:g} / {own:g}"
    return shown + ("!" if row["edge"] else "")


def _routed(row: Record, key: str, digits: int = 2) -> str:
    values = row["routing"][key], row["routing"][f"deep_{key}"]
    return "-" if None in values else " / ".join(f"{value:.{digits}f}" for value in values)


def _flat(row: Record) -> Values:
    flat = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    for key in ("loss", "perplexity", "bits_per_byte", "loss_at_equal_time"):
        value = row[key] or dict.fromkeys(("mean", "deviation"))
        flat |= {f"{key}_mean": value["mean"], f"{key}_deviation": value["deviation"]}
        flat.pop(key, None)
    flat.pop("difference", None)
    gap = row["difference"] or dict.fromkeys(("mean", "low", "high", "detectable", "significant"))
    flat |= {f"difference_{key}": gap[key] for key in ("mean", "low", "high", "detectable", "significant")}
    return flat | dict(row["rates"]) | dict(row["routing"])
