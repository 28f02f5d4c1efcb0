"""routing_html(summary): a recording as a notebook shows it, the mean weights as a map and the numbers below it.

One piece of HTML with its style inside, light or dark as the page around it is; every name is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import html_table
from residua.lab.diagnose.table import routing_cells
from residua.lab.plots import svg


def routing_html(summary: Record) -> str:
    """The picture and the table of `RoutingRecord.summary`; the table alone where no site mixes sources."""
    sites = [site for site in summary["sites"] if "routing" in site]
    means = {site["site"]: _over_lanes(site["routing"]["mean_weights"]) for site in sites}
    drawn = ""
    if sites:
        signed = any(site["routing"]["weights"] == "signed" for site in sites)
        grid = weight_grid(summary["sites"], means, signed=signed)
        drawn = svg.heat(
            grid["sites"], grid["sources"], grid["weights"], f"Mean weights of {summary['design']}",
            signed=grid["signed"], heading="mean weight: rows read, columns are read",
        )  # fmt: skip
    title, (header, *rows), note = routing_cells(summary)
    # the variables of the page's style stay inside this piece
    style = svg.STYLE.replace(":root", ".residua")
    return f'<div class="residua"><style>{style}</style>{drawn}{html_table(header, rows, [title, note])}</div>'


def weight_grid(sites: Sequence[Record], means: Mapping[str, Sequence[float | None]], *, signed: bool) -> Values:
    """[site][source] of the sites that have mean weights; None where a site cannot read a source."""
    mixing = [site for site in sites if site["site"] in means]
    sources = in_depth_order({site["site"]: site["index"] for site in sites}, [site["sources"] for site in mixing])
    known = [dict(zip(site["sources"], means[site["site"]], strict=True)) for site in mixing]
    weights = [[own.get(source) for source in sources] for own in known]
    return {
        "sites": [site["site"] for site in mixing],
        "sources": sources,
        "weights": weights,
        "signed": signed or any(weight is not None and weight < 0 for row in weights for weight in row),
    }


def in_depth_order(sites: Mapping[str, int], reads: Sequence[Sequence[str]]) -> list[str]:
    """Every source that some site reads, the shallow before the deep.

    A source is as deep as the site it is named after (by `sites`, name -> index), else as its last number. Without a
    number (`embed`, `evicted`, `partial`) it comes before those that have one, or after them if it is the newest
    source of every site that reads it beside others. Equals keep the order in which they are first read.
    """
    first: dict[str, int] = {}
    for name in (name for read in reads for name in read):
        first.setdefault(name, len(first))

    def place(name: str) -> tuple[int, int, int]:
        numbers = re.findall(r"\d+", name)
        if name in sites:
            return 0, sites[name], first[name]
        if numbers:
            return 0, int(numbers[-1]), first[name]
        beside = [read for read in reads if name in read and len(read) > 1]
        return (1 if beside and all(read[-1] == name for read in beside) else -1), 0, first[name]

    return sorted(first, key=place)


def _over_lanes(lanes: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over lanes of each source; None where one of them is not finite."""
    return [None if None in values else fmean(values) for values in zip(*lanes, strict=True)]
