"""Summaries as plain text: columns by width, one line a site."""

from __future__ import annotations

from collections.abc import Sequence

from residua.lab.common.files import Record
from residua.lab.diagnose.metrics import JUDGED_SOURCES

SHARES_NOTE = "max, entropy and effective are of |w| / sum |w| where weights are scaled (sum not 1) or signed"


def routing_table(summary: Record) -> str:
    """The text of `RoutingRecord.summary`."""
    title, rows, note = routing_cells(summary)
    return "\n".join([title, *align(rows), note])


def routing_cells(summary: Record) -> tuple[str, list[list[str]], str]:
    """What the table is of, its rows (the first is the header) without columns that say nothing, and a note."""
    header = ["site", "n", "weights", "max", "entropy", "effective", "favourite", "agree", "collapsed", "rank"]
    header += ["stream rms", "output rms", "gradient", "gates"]
    rows = [_site_row(site) for site in summary["sites"]]
    mixes = summary["network"]["mixing_sites"] > 0
    for title, name in (("network", "network"), ("last third", "deep_third")) if mixes else ():
        average = summary[name]
        share = average["collapsed_share"]
        rows.append(
            [title, "", "", _text(average["max_weight"]), _text(average["normalised_entropy"]),
             _text(average["effective_sources"], 2), "", "",
             "-" if share is None else f"{len(average['collapsed_sites'])}/{average['judged_sites']}",
             _text(average["effective_rank"], 2), "", "", "", ""]
        )  # fmt: skip
    used = [place for place in range(len(header)) if any(row[place] not in ("", "-") for row in rows)]
    title = f"{summary['design']}: {summary['forwards']} forwards, {summary['tokens']} tokens"
    note = f"collapsed: judged at sites with {JUDGED_SOURCES} or more sources; {SHARES_NOTE}"
    cells = [[row[place] for place in used] for row in (header, *rows)]
    return title, cells, note if mixes else "no site mixes sources"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(text.rjust(width) if place else text.ljust(width) for place, (text, width) in columns).rstrip()
        for columns in (enumerate(zip(row, widths, strict=True)) for row in rows)
    ]


def _site_row(site: Record) -> list[str]:
    routing = site.get("routing", {})
    judged = {None: "-", True: "yes", False: "no"}[routing.get("collapsed")]
    gates = " ".join(f"{name}={_text(gate['mean'], 4)}" for name, gate in site["gates"].items())
    return [
        site["site"], str(len(site["sources"]) or "-"), routing.get("weights", "-"), _text(routing.get("max_weight")),
        _text(routing.get("normalised_entropy")), _text(routing.get("effective_sources"), 2),
        routing.get("favourite", "-"), _text(routing.get("agreement")), judged,
        _text(routing.get("effective_rank"), 2), _text(site["stream_rms"], 4), _text(site["output_rms"], 4),
        _text(site["gradient_norm"], 6), gates or "-",
    ]  # fmt: skip


def _text(value: float | None, places: int = 3) -> str:
    return "-" if value is None else f"{value:.{places}f}"
