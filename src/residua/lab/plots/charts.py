"""The pictures of a page, each from plain data with the series in a list: the page, a notebook and the documentation
draw the same.

    data["series"]   label, colour and dash of each
    data["curves"], data["depth"], data["quality"], data["paper"]   as `residua.lab.figures` has them, by series
"""

from __future__ import annotations

from collections.abc import Sequence

from residua.lab.common.files import Record
from residua.lab.plots import svg
from residua.lab.plots.parted import by_size
from residua.lab.plots.style import points_over_depth

MEASURED = {
    "max_weight": "largest share of a read",
    "normalised_entropy": "entropy of a read (1: all alike)",
    "effective_sources": "effective sources",
    "cosine": "similarity of the sources (cosine)",
    "stream_rms": "RMS of what the site reads",
    "output_rms": "RMS of what the sublayer adds",
    "gradient_norm": "gradient norm at its output",
}
PAPER: Record = {"states": 0.2, "deltas": 0.6, "source": "arXiv 2605.18855, deep layers"}
"""The largest weight of a read that the Delta paper reports of routing over states and over deltas."""
SHARES = ("max_weight", "normalised_entropy")
BLOCKS = "Transformer block (the head is last)"


def measured_in(data: Record) -> list[tuple[str, str]]:
    """The numbers over depth that some series has, with their titles."""
    return [one for one in MEASURED.items() if any(each and any(known(each.get(one[0], ()))) for each in data["depth"])]


def curve_charts(data: Record) -> list[str]:
    """Loss against tokens and against processor time, from the second validation on: the first is of no model."""
    charts = []
    for size, places in by_size(labels(data)).items():
        for key, title in (("tokens", "training tokens"), ("cpu_seconds", "processor seconds")):
            lines = []
            for place in places:
                curve = data["curves"][place]
                start = 1 if len(curve["tokens"]) > 2 else 0
                loss = [curve["loss"][part][start:] for part in ("mean", "low", "high")]
                lines.append(svg.Line(*named(data, place), curve[key][start:], *loss))
            charts.append(svg.lines(svg.Chart(titled("validation loss", size), title, lines)))
    return charts


def weight_maps(maps: Sequence[tuple[str, Record]], *, headed: bool = False) -> list[str]:
    """One map a design; one scale for those with signed weights, and one for the others."""
    tops: dict[bool, float] = {}
    for _, each in maps:
        sizes = [abs(value) for row in each["weights"] for value in row if value is not None]
        tops[each["signed"]] = max([*sizes, tops.get(each["signed"], 0.0)])
    return [
        svg.heat(
            each["sites"], each["sources"], each["weights"], f"Mean weights of {label}",
            signed=each["signed"], largest=tops[each["signed"]], heading=label if headed else "",
        )
        for label, each in maps
    ]  # fmt: skip


def depth_charts(data: Record, measured: Sequence[tuple[str, str]]) -> list[str]:
    """A chart for each number over depth."""
    charts = []
    for size, places in by_size(labels(data)).items():
        depths = {place: depth for place in places if (depth := data["depth"][place]) is not None}
        for key, title in measured:
            lines = [
                svg.Line(*named(data, place), *points_over_depth(depth, key), dots=len(depth["sites"]) <= 40)
                for place, depth in depths.items()
                if any(known(depth[key]))
            ]
            paper = [(data["paper"][what], f"paper, {what}") for what in ("states", "deltas") if key == "max_weight"]
            deep = _deep_third([*depths.values()], lines)
            chart = svg.Chart(titled(title, size), BLOCKS, lines, key in SHARES, deep, paper, whole=True)
            charts.append(svg.lines(chart))
    return charts


def _deep_third(depths: Sequence[Record], lines: Sequence[svg.Line]) -> tuple[float, float] | None:
    """Where the last third of the blocks begins and ends among what is drawn, if all series agree."""
    begins = {depth["position"][depth["deep"].index(True)] for depth in depths if True in depth["deep"]}
    xs = [x for line in lines for x in line.xs]
    if len(begins) != 1 or not xs:
        return None
    (begin,) = begins
    return (max(begin - 0.25, min(xs)), max(xs)) if max(xs) > begin else None


def quality_charts(data: Record) -> list[str]:
    """Bits per byte against speed and memory over the baseline's."""
    charts = []
    for size, places in by_size(labels(data)).items():
        for key, title in (("speed", "bits per byte and speed"), ("memory", "bits per byte and memory")):
            rows = [
                (*named(data, place), quality[key], quality["bits_per_byte"])
                for place in places
                if (quality := data["quality"][place]) is not None and quality[key] is not None
            ]
            if len(rows) > 1:
                better = f"{key}, times the baseline's ({'right is faster' if key == 'speed' else 'left is smaller'})"
                charts.append(svg.points(rows, better, "bits per byte", titled(title, size)))
    return charts


def designs(data: Record) -> list[Record]:
    """The series as a legend takes them: one of every name, where the same look stands for it at every size."""
    found: dict[str, Record] = {}
    for places in by_size(labels(data)).values():
        for place, name in places.items():
            found.setdefault(name, {**data["series"][place], "label": name})
    return list(found.values())


def labels(data: Record) -> dict[int, str]:
    """The label of every series, by its place."""
    return {place: each["label"] for place, each in enumerate(data["series"])}


def titled(title: str, size: str) -> str:
    """The title of a chart that shows one size of several."""
    return f"{title}, {size}" if size else title


def named(data: Record, place: int) -> tuple[str, str]:
    """The style and the name of a series, as the charts take them."""
    return svg.style(data["series"][place]), data["series"][place]["label"]


def known(values: Sequence[object]) -> list[bool]:
    """Which of them are there."""
    return [value is not None for value in values]
