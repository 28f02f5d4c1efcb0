"""The comparison as a terminal table, HTML, Markdown and CSV, all from the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import (
    confidence,
    count,
    difference,
    html_table,
    mde,
    print_table,
    rates,
    spread,
    terminal,
    times,
)
from residua.lab.compare import pace


def columns(results: Record) -> dict[str, Callable[[Record], str]]:
    """Title -> cell, for the columns that this comparison needs."""
    rows, unresolved = results["rows"], pace.unresolved(results.get("pace"))
    found: dict[str, Callable[[Record], str]] = {
        "design": lambda row: row["label"],
        **({"seeds": _seeds_of(results)} if results.get("unfinished") else {}),
        "params": lambda row: f"{row['parameters']:,}",
        "val loss": lambda row: spread(row["loss"], 4),
        "perplexity": lambda row: spread(row["perplexity"], 2),
        "bits/byte": lambda row: spread(row["bits_per_byte"], 4),
        "vs baseline": difference,
        "equal time": lambda row: "-" if (at := row["loss_at_equal_time"]) is None else f"{at['mean']:.4f}",
        "lr": _rates,
        "speed": lambda row: "n.r." if row["label"] in unresolved else times(row["speed"]),
        "memory": lambda row: times(row["memory"]),
    }
    if any(row["routing"]["max_weight"] is not None for row in rows):
        found |= {
            "max w": lambda row: _routed(row, "max_weight"),
            "entropy": lambda row: _routed(row, "normalised_entropy"),
            "eff n": lambda row: _routed(row, "effective_sources", 1),
            "collapsed": lambda row: _routed(row, "collapsed_share"),
        }
    if any(row.get("speedup") for row in rows):
        found |= {
            "speedup/token": lambda row: _speedup(row, "per_token"),
            "speedup/CPU s": lambda row: _speedup(row, "per_cpu_second"),
        }
    if any(row.get("gradient_norm") is not None for row in rows):
        found |= {
            "grad max": lambda row: "-" if row["gradient_norm"] is None else f"{row['gradient_norm']:.3g}",
            "spikes": lambda row: f"{row['spikes']}",
        }
    if any(row.get("stable_rate") for row in rows):
        found["stable lr"] = _stable
    for key in ("hardware", "build"):
        kinds = {row.get(key, "") for row in rows}  # results of earlier versions do not say
        if len(kinds) > 1 or any("; " in kind for kind in kinds):
            found[key] = lambda row, key=key: row.get(key, "")  # type: ignore[misc]
    return found


def legend(results: Record) -> str:
    """What the columns mean, in as few lines as will do."""
    match = results["plan"]["match"]
    matched = match if match != "none" else "nothing; see params"
    chosen = "lr: chosen beforehand, for every row apart. " if results["plan"].get("chosen") else ""
    seeds = _seeds(results)
    level, (why, least) = confidence(results), _judged(results)
    lines = [
        f"val loss: nats per token, mean +- standard deviation over {seeds}. "
        f"vs baseline: mean paired difference with its {level} t interval;",
        f"n.s.: not significant, {why}; {least}.",
        f"equal time: loss when the fastest row{_among(results)} was done, others in mid-schedule. "
        "speed: tokens per CPU second, and peak memory, over the baseline's;",
        f"{_how_rough(results)}.",
        f"matched on: {matched}. {chosen}max w, entropy (0..1), eff n, collapsed: "
        "routing over all sites / the deep third.",
    ]
    if any(row.get("gradient_norm") is not None for row in results["rows"]):
        lines.append(
            "grad max: largest gradient norm of any update. spikes: losses 7 deviations above the 128 before, "
            "all seeds. stable lr: largest rate of the grid up to which none diverged or ended a tenth above the best."
        )
    return "\n".join(lines)


def _how_rough(results: Record) -> str:
    """What the column of speeds is worth."""
    if "pace" in results:
        return "speed n.r.: not resolved by updates timed in turn"
    return "speed is rough (the runs are not interleaved; repeats on a shared machine differed by up to 30 %)"


def _judged(results: Record) -> tuple[str, str]:
    """When a difference is not significant, and what MDE stands for."""
    judged = results.get("statistics")
    if judged is None:  # results of earlier versions were judged row by row
        return "the interval contains zero", mde(None)
    together = f"{100 * judged['alpha']:g} % for all {judged['rows']} rows together (Holm)"
    return together, mde(judged.get("mde_rows"))


def to_markdown(results: Record) -> str:
    """A Markdown table with its notes."""
    cells = columns(results)
    left = results.get("unfinished")
    lines = (
        []
        if left is None
        else [f"**Unfinished: {left['runs']} of {left['of']} runs; the first note says which are missing.**", ""]
    )
    lines += ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
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
    others = [title for title in cells if title not in (*KEPT, *SPARED)]
    for title in (*others, *SPARED):
        if _width(cells, results["rows"]) <= width:
            break
        if cells.pop(title, None) is not None:
            dropped.append(title)
    if _width(cells, results["rows"]) > width:
        cells["val loss"] = lambda row: f"{row['loss']['mean']:.4f}"
    rows = [[cell(row) for cell in cells.values()] for row in results["rows"]]
    below = (legend(results) if not dropped else _legend_of(results, cells, dropped)).split("\n")
    print_table(list(cells), rows, below, results["notes"])


KEPT = ("design", "seeds", "val loss", "vs baseline")
"""What every terminal shows."""
SPARED = ("perplexity", "equal time", "eff n", "collapsed", "hardware", "entropy", "memory", "lr", "bits/byte", "max w",
          "speed", "params")  # fmt: skip
"""What a narrow terminal does without, first to last, after columns that are not named here."""


def _seeds_of(results: Record) -> Callable[[Record], str]:
    """How many of its seeds a row of an unfinished comparison has."""
    planned = {row["label"]: row["of"] for row in results["unfinished"]["rows"]}
    return lambda row: f"{row['loss']['seeds']} of {planned.get(row['label'], row['loss']['seeds'])}"


def _among(results: Record) -> str:
    """Of whom the fastest sets the time."""
    return " of its size" if len(results["plan"]["sizes"]) > 1 else ""


def _seeds(results: Record) -> str:
    """How many seeds the rows have."""
    counts = sorted({row["loss"]["seeds"] for row in results["rows"]})
    return count(counts[0], "seed") if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]} seeds"


def _width(cells: Mapping[str, Callable[[Record], str]], rows: Sequence[Record]) -> int:
    """Columns that the table takes on a terminal, with three between any two and one at each end."""
    return sum(3 + max(len(title), *(len(cell(row)) for row in rows)) for title, cell in cells.items())


def _legend_of(results: Record, shown: Mapping[str, object], dropped: Sequence[str]) -> str:
    """The legend of the columns that are shown, a sentence each."""
    match, level, (why, least) = results["plan"]["match"], confidence(results), _judged(results)
    said = {
        "val loss": f"val loss: nats per token, mean +- deviation over {_seeds(results)}",
        "vs baseline": f"vs baseline: mean paired difference with its {level} t interval; n.s.: not significant, {why}",
        "equal time": f"equal time: loss when the fastest row{_among(results)} was done",
        "speed": "speed: tokens per CPU second over the baseline's, "
        + ("of updates timed in turn" if "pace" in results else "rough"),
        "memory": "memory: at the peak, over the baseline's",
        "max w": "max w: largest weight of a read, over all sites / the deep third",
        "entropy": "entropy: of a read, 0..1, likewise",
    }
    lines = [f"{text}." for title, text in said.items() if title in shown]
    if "vs baseline" in shown:
        lines.append(f"{least}.")
    lines.append(f"matched on: {match if match != 'none' else 'nothing'}. Not shown here: {', '.join(dropped)}.")
    return "\n".join(lines)


def _rates(row: Record) -> str:
    return rates(row["rates"], row["stream_parameters"]) + ("!" if row["edge"] else "")


def _speedup(row: Record, axis: str) -> str:
    """`1.31x [1.22, 1.40]`; `1.02x n.s.`; a star where the curve is used beyond its largest size."""
    if row["speedup"] is None or (found := row["speedup"][axis]) is None:
        return "-"
    low, high = ("inf" if found[key] is None else f"{found[key]:.2f}" for key in ("low", "high"))
    value = "inf" if found["factor"] is None else f"{found['factor']:.2f}x"
    star = "*" if found["extrapolated"] else ""
    return f"{value}{star} [{low}, {high}]" if found["significant"] else f"{value}{star} n.s."


def _stable(row: Record) -> str:
    stable = row["stable_rate"]
    return "-" if stable is None else f"{'>= ' if stable['open'] else ''}{stable['lr']:g}"


def _routed(row: Record, key: str, digits: int = 2) -> str:
    values = row["routing"][key], row["routing"][f"deep_{key}"]
    if values == (None, None):
        return "-"
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def _flat(row: Record) -> Values:
    flat = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    flat.pop("stable_rate", None)
    flat.pop("speedup", None)
    for key in ("loss", "perplexity", "bits_per_byte", "loss_at_equal_time"):
        value = row[key] or dict.fromkeys(("mean", "deviation"))
        flat |= {f"{key}_mean": value["mean"], f"{key}_deviation": value["deviation"]}
        flat.pop(key, None)
    flat["seeds"] = row["loss"]["seeds"]
    flat.pop("difference", None)
    gap = row["difference"] or dict.fromkeys(("mean", "low", "high", "detectable", "significant"))
    flat |= {f"difference_{key}": gap[key] for key in ("mean", "low", "high", "detectable", "significant")}
    if "stable_rate" in row:
        flat["stable_rate"] = None if row["stable_rate"] is None else row["stable_rate"]["lr"]
        for axis in ("per_token", "per_cpu_second"):
            found = (row["speedup"] or {}).get(axis) or dict.fromkeys(("factor", "low", "high"))
            flat |= {f"speedup_{axis}_{key}": found[key] for key in ("factor", "low", "high")}
    return flat | dict(row["rates"]) | dict(row["routing"])
