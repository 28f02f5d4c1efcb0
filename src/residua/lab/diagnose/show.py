"""routing_html, inspection_html, ablation_html: what a notebook shows of a recording, a prompt and of knock-outs.

One piece of HTML each with its style inside, light or dark as the page around it is; every name is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from residua.lab.common.files import Record, Values
from residua.lab.common.tables import html_table
from residua.lab.diagnose.table import routing_cells
from residua.lab.plots import svg
from residua.lab.plots.notebook import piece


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
    return piece(drawn, html_table(header, rows, [title, note]))


def inspection_html(found: Record) -> str:
    """The mean weights of a prompt, and the largest weight of every site at every token."""
    loss = "" if found["loss"] is None else f"; loss {found['loss']:.4f} nats per token"
    said = f"<p>{escape(found['design'])}: {len(found['tokens'])} tokens{loss}</p>"
    if not found["weights"]:
        return piece(said, "<p>no site mixes sources</p>")
    kinds = {site["site"]: site["routing"]["weights"] for site in found["record"]["sites"] if "routing" in site}
    signed = "signed" in kinds.values()
    means, largest = {}, []
    for site, lanes in found["weights"].items():
        rows = [_over_lanes([_over_groups(lane[source]) for lane in lanes]) for source in range(len(lanes[0]))]
        means[site] = [_mean(row) for row in rows]
        largest.append([max((value for value in values if value is not None), key=abs, default=None)
                        for values in zip(*rows, strict=True)])  # fmt: skip
    grid = weight_grid(found["record"]["sites"], means, signed=signed)
    maps = [
        svg.heat(
            grid["sites"], grid["sources"], grid["weights"], f"Mean weights of {found['design']}",
            signed=grid["signed"], heading="mean weight: rows read, columns are read",
        ),
        svg.heat(
            list(means), [token.replace(" ", "\u00b7") for token in found["tokens"]], largest,
            f"Largest weight by site and token of {found['design']}", signed=grid["signed"],
            heading="largest weight at every token",
        ),
    ]  # fmt: skip
    return piece(said, *maps)


def ablation_html(design: str, loss: float, change: Mapping[str, Mapping[str, float]]) -> str:
    """The change of the loss, site by source."""
    sources = list(dict.fromkeys(name for own in change.values() for name in own))
    cells = [[own.get(name) for name in sources] for own in change.values()]
    said = f"<p>{escape(design)}: loss {loss:.4f} nats per token with every source</p>"
    if not cells:
        return piece(said, "<p>no site mixes sources</p>")
    heading = "change of the loss: rows read without the column"
    return piece(said, svg.heat(list(change), sources, cells, heading, signed=True, heading=heading, digits=3))


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


def _over_groups(tokens: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over groups at each token."""
    return [_mean(groups) for groups in tokens]


def _over_lanes(lanes: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over lanes of each source; None where one of them is not finite."""
    return [_mean(values) for values in zip(*lanes, strict=True)]


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one of them is not finite."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
