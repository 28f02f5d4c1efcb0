"""The comparison as a terminal table, HTML, Markdown and CSV, all from the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import MDE, count, difference, html_table, print_table, spread, terminal, times


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
    kinds = {row.get("hardware", "") for row in rows}  # results of earlier versions do not say
    if len(kinds) > 1 or any("; " in kind for kind in kinds):
        found["hardware"] = lambda row: row.get("hardware", "")
    return found


def legend(results: Record) -> str:
    """What the columns mean, in as few lines as will do."""
    match = results["plan"]["match"]
    matched = match if match != "none" else "nothing; see params"
    chosen = "lr: chosen beforehand, for every row apart. " if results["plan"].get("chosen") else ""
    lines = [
        f"val loss: nats per token, mean +- standard deviation over {count(len(results['plan']['seeds']), 'seed')}. "
        "vs baseline: mean paired difference with its 95 % t interval;",
        f"n.s.: not significant, the interval contains zero; {MDE} by these seeds.",
        "equal time: loss when the fastest row was done, others in mid-schedule. speed: tokens per CPU second, and "
        "peak memory, over the baseline's;",
        "speed is rough (the runs are not interleaved; repeats on a shared machine differed by up to 30 %).",
        f"matched on: {matched}. {chosen}max w, entropy (0..1), eff n, collapsed: "
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
    """Print the table to the terminal; a narrow one leaves out columns until no cell is folded, and says which."""
    cells, width, dropped = columns(results), terminal().width, list[str]()
    for title in SPARED:
        if _width(cells, results["rows"]) <= width:
            break
        if cells.pop(title, None) is not None:
            dropped.append(title)
    rows = [[cell(row) for cell in cells.values()] for row in results["rows"]]
    below = (legend(results) if not dropped else _legend_of(results, cells, dropped)).split("\n")
    print_table(list(cells), rows, below, results["notes"])


SPARED = ("perplexity", "equal time", "eff n", "collapsed", "hardware", "entropy", "memory", "lr", "bits/byte", "max w",
          "speed", "params")  # fmt: skip
"""What a narrow terminal does without, first to last."""


def _width(cells: Mapping[str, Callable[[Record], str]], rows: Sequence[Record]) -> int:
    """Columns that the table takes on a terminal, with two between any two and one at each end."""
    return 2 + sum(2 + max(len(title), *(len(cell(row)) for row in rows)) for title, cell in cells.items())


def _legend_of(results: Record, shown: Mapping[str, object], dropped: Sequence[str]) -> str:
    """The legend of the columns that are shown, a sentence each."""
    match = results["plan"]["match"]
    said = {
        "val loss": f"val loss: nats per token, mean +- deviation over {count(len(results['plan']['seeds']), 'seed')}",
        "vs baseline": "vs baseline: mean paired difference with its 95 % t interval; n.s.: the interval holds zero",
        "equal time": "equal time: loss when the fastest row was done",
        "speed": "speed: tokens per CPU second over the baseline's, rough",
        "memory": "memory: at the peak, over the baseline's",
        "max w": "max w: largest weight of a read, over all sites / the deep third",
        "entropy": "entropy: of a read, 0..1, likewise",
    }
    lines = [f"{text}." for title, text in said.items() if title in shown]
    if "vs baseline" in shown:
        lines.append(f"{MDE}.")
    lines.append(f"matched on: {match if match != 'none' else 'nothing'}. Not shown here: {', '.join(dropped)}.")
    return "\n".join(lines)


def _rates(row: Record) -> str:
    lr, own = row["rates"]["lr"], row["rates"]["residual_lr"]
    shown = f"{lr:g}" if own == lr or not row["stream_parameters"] else f"{lr:g} / {own:g}"
    return shown + ("!" if row["edge"] else "")


def _routed(row: Record, key: str, digits: int = 2) -> str:
    values = row["routing"][key], row["routing"][f"deep_{key}"]
    if values == (None, None):
        return "-"
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


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
