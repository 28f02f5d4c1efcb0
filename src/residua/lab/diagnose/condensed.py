"""condensed(routing): the summary of a routing record in a few kilobytes: what tables, figures and pages read of it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from residua.lab.common.files import Record, Values

MOST_LANES = 2000
"""Mean weights of single lanes that are kept; where a model has more, the means over the lanes alone are."""


def condensed(routing: Record) -> Values:
    """The routing of a run in short numbers, with one cosine a site in place of that of every pair of its sources."""
    lanes = sum(len(row) for site in routing["sites"] for row in site.get("routing", {}).get("mean_weights", ()))
    found = {**routing, "sites": [_site(site, keep_lanes=lanes <= MOST_LANES) for site in routing["sites"]]}
    return _short(found)


def mean_cosine(routing: Record, sources: int) -> float | None:
    """How alike the sources of a site are: the mean cosine over its pairs, from all of them or from a record."""
    cosine = routing.get("cosine")
    if not isinstance(cosine, list):
        return cosine
    pairs = [cosine[i][j] for i in range(sources) for j in range(i)]
    return None if not pairs or None in pairs else fmean(pairs)


def _site(site: Record, *, keep_lanes: bool) -> Values:
    if "routing" not in site:
        return dict(site)
    routing: Record = site["routing"]
    left_out = {"mean_shares", "cosine"} | (set() if keep_lanes else {"mean_weights"})
    own = {key: value for key, value in routing.items() if key not in left_out}
    if "cosine" in routing:
        own["cosine"] = mean_cosine(routing, len(site["sources"]))
    return {**site, "routing": own}


def _short(value: Any) -> Any:
    """Numbers to four significant digits: more than two seeds share, and no more than a figure shows."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value
