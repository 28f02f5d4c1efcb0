"""render(data): the whole page as one text: style, script, data and pictures inside, nothing fetched from anywhere.

A content-security policy allows the one script and the one style by their hash, and nothing else: no other script, no
request, no frame, no form. Text is escaped by the template, and the data cannot close their element.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from residua._version import __version__
from residua.lab.common.files import Record, Values
from residua.lab.common.tables import times
from residua.lab.plots import svg
from residua.lab.plots.style import points_over_depth
from residua.lab.report.look import MOST_OFFSETS
from residua.lab.runs import mean_if_all

HERE = Path(__file__).parent
SCRIPTS = ("core", "chart", "heat", "explorer", "views")
TABLED = 1500
"""Cells up to which a map is a table too."""
STATIC_TOKENS = 80

VIEWS = {
    "summary": ("Summary", "Best first, the noise stated, the cost beside the quality."),
    "curves": ("Curves", "Validation loss against tokens seen and against processor time."),
    "routing": ("Routing explorer", "Which earlier outputs every sublayer reads, and how strongly."),
    "depth": ("Depth", "How the network changes from its first block to its head."),
    "axes": ("Two axes", "The same operator over tokens and over layers, as these runs use it."),
    "costs": ("Costs", "What the designs cost here, beside what counting predicts."),
    "runs": ("Runs", "Where every number comes from, and how to make it again."),
}
MEASURED = {
    "max_weight": "largest weight of a read",
    "normalised_entropy": "entropy of a read (1: all alike)",
    "effective_sources": "effective sources",
    "cosine": "similarity of the sources (cosine)",
    "stream_rms": "RMS of what the site reads",
    "output_rms": "RMS of what the sublayer adds",
    "gradient_norm": "gradient norm at its output",
}
SHARES = ("max_weight", "normalised_entropy")
REGIMES = {"identity": "c-sky", "projection": "c-blue", "reflection": "c-vermillion", "between": "c-none"}


def render(data: Record) -> str:
    """The page of what `gather` or an inspection found."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([HERE, HERE / "views"]),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    css = svg.STYLE + (HERE / "style.css").read_text()
    script = _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    left_out = ("summary", "curves", "costs", "runs") if data["kind"] == "inspection" else ()
    views = [{"key": key, "title": title, "lead": lead} for key, (title, lead) in VIEWS.items() if key not in left_out]
    measured = measured_in(data)
    return environment.get_template("page.html.jinja").render(
        data=data,
        policy=policy,
        css=css,
        script=script,
        json=as_json({**data, "measured": measured, "shares": SHARES}),
        views=views,
        version=__version__,
        styles=[svg.style(each) for each in data["series"]],
        starts={0, *accumulate(len(group["columns"]) for group in (data["summary"] or {"groups": ()})["groups"])},
        figures={
            "forest": _forest(data),
            "curves": curve_charts(data) if data["curves"] else [],
            "routing": _maps(data),
            "depth": depth_charts(data, measured),
            "points": quality_charts(data),
            "speeds": _speeds(data),
        },
        unrouted=[place for place, each in enumerate(data["routing"]) if each is None],
        regimes=REGIMES,
        regimes_of=_regimes,
        strip=_strip,
        by_offset=_by_offset,
        grid=grid,
        most=TABLED,
        measured=measured,
        of_prompt=any(
            depth and depth["gradient_of"] == "prompt" and any(_known(depth["gradient_norm"]))
            for depth in data["depth"]
        ),
        claim=_claim(data),
        offsets=MOST_OFFSETS,
        ratio=times,
        whole=lambda value: "-" if value is None else f"{value:,.0f}",
        mebibytes=lambda value: "-" if value is None else f"{value / 2**20:,.1f}",
    )


def measured_in(data: Record) -> list[tuple[str, str]]:
    """The numbers over depth that some series has, with their titles."""
    return [
        one for one in MEASURED.items() if any(each and any(_known(each.get(one[0], ()))) for each in data["depth"])
    ]


def as_json(value: object) -> str:
    """JSON that no content can turn into markup: the signs that could close or open something are escapes."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def _script() -> str:
    parts = [(HERE / "script" / f"{name}.js").read_text() for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _forest(data: Record) -> str:
    rows = [] if data["summary"] is None else data["summary"]["differences"]
    named = [(*_named(data, row["series"]), row) for row in rows]
    return svg.forest(named) if named else ""


def curve_charts(data: Record) -> list[str]:
    """Loss against tokens and against processor time, from the second validation on: the first is of no model."""
    charts = []
    for key, title in (("tokens", "training tokens"), ("cpu_seconds", "processor seconds")):
        lines = []
        for place, curve in enumerate(data["curves"]):
            start = 1 if len(curve["tokens"]) > 2 else 0
            loss = [curve["loss"][part][start:] for part in ("mean", "low", "high")]
            lines.append(svg.Line(*_named(data, place), curve[key][start:], *loss))
        charts.append(svg.lines(svg.Chart("validation loss", title, lines)))
    return charts


def weight_maps(named: Sequence[tuple[str, Record]], *, headed: bool = False) -> list[str]:
    """One map a design; one scale for those with signed weights, and one for the others."""
    tops: dict[bool, float] = {}
    for _, each in named:
        sizes = [abs(value) for row in each["weights"] for value in row if value is not None]
        tops[each["signed"]] = max([*sizes, tops.get(each["signed"], 0.0)])
    return [
        svg.heat(
            each["sites"], each["sources"], each["weights"], f"Mean weights of {label}",
            signed=each["signed"], largest=tops[each["signed"]], heading=label if headed else "",
        )
        for label, each in named
    ]  # fmt: skip


def _maps(data: Record) -> list[Values]:
    routed = [(place, each | {"weights": grid(each, 0)}) for place, each in enumerate(data["routing"]) if each]
    drawn = weight_maps([(data["series"][place]["label"], each) for place, each in routed])
    return [{"series": place, "map": each} for (place, _), each in zip(routed, drawn, strict=True)]


def grid(each: Record, seed: int) -> list[list[float | None]]:
    """[site][source] of the mean over seeds (0) or of a seed (1, 2, ...); None where a site cannot read a source."""
    flat = iter(each["means"]["mean"][seed])
    rows = []
    for reads in each["reads"]:
        own = {source: next(flat) for source in reads}
        rows.append([own.get(source) for source in range(len(each["sources"]))])
    return rows


def unpacked(each: Record, seed: int, view: int = 0) -> list[list[float]]:
    """[cell][token] of a seed: what the script unpacks."""
    from array import array

    numbers = array("h", base64.b64decode(each["packed"][seed]))
    tokens, cells = len(each["tokens"]), sum(map(len, each["reads"]))
    start = view * cells * tokens
    return [[numbers[start + cell * tokens + token] * each["step"] for token in range(tokens)] for cell in range(cells)]


def _strip(each: Record, label: str) -> str:
    """The largest weight of every site at every token."""
    cells, shown = iter(unpacked(each, 0)), each["tokens"][:STATIC_TOKENS]
    sites = [[next(cells) for _ in reads] for reads in each["reads"]]
    rows = [[max((row[token] for row in own), key=abs) for token in range(len(shown))] for own in sites]
    return svg.heat(each["sites"], shown, rows, f"Largest weight by site and token of {label}", signed=each["signed"])


def depth_charts(data: Record, measured: Sequence[tuple[str, str]]) -> list[str]:
    """A chart for each number over depth."""
    charts = []
    for key, title in measured:
        lines = [
            svg.Line(*_named(data, place), *points_over_depth(depth, key), dots=len(depth["sites"]) <= 40)
            for place, depth in enumerate(data["depth"])
            if depth is not None and any(_known(depth[key]))
        ]
        paper = [(data["paper"][what], f"paper, {what}") for what in ("states", "deltas") if key == "max_weight"]
        deep = _deep_third(data["depth"], lines)
        charts.append(svg.lines(svg.Chart(title, "Transformer block", lines, key in SHARES, deep, paper)))
    return charts


def _deep_third(depths: Sequence[Record | None], lines: Sequence[svg.Line]) -> tuple[float, float] | None:
    """Where the last third of the blocks begins and ends among what is drawn, if all series agree."""
    begins = {depth["position"][depth["deep"].index(True)] for depth in depths if depth and True in depth["deep"]}
    xs = [x for line in lines for x in line.xs]
    if len(begins) != 1 or not xs:
        return None
    (begin,) = begins
    return (max(begin - 0.25, min(xs)), max(xs)) if max(xs) > begin else None


def _regimes(beta: Record, label: str) -> str:
    shares = [(REGIMES[name], name, values) for name, values in beta["regimes"].items()]
    return svg.stacked(beta["sites"], shares, f"Regimes of beta of {label}")


def _by_offset(part: Record, unit: str, label: str) -> str:
    """One of the two axes: the weights of every site by how many sources or tokens back."""
    most = min(MOST_OFFSETS, max(map(len, part["weights"])))
    cells = [[*row[:most], *[None] * (most - len(row))] for row in part["weights"]]
    title, signed = f"Weight by {unit}s back of {label}", part.get("signed", False)
    return svg.heat(part["sites"], [str(back) for back in range(most)], cells, title, signed=signed)


def quality_charts(data: Record) -> list[str]:
    """Bits per byte against speed and memory over the baseline's."""
    charts = []
    for key, title in (("speed", "bits per byte and speed"), ("memory", "bits per byte and memory")):
        rows = [
            (*_named(data, place), quality[key], quality["bits_per_byte"])
            for place, quality in enumerate(data["quality"])
            if quality is not None and quality[key] is not None
        ]
        if len(rows) > 1:
            better = "right is faster" if key == "speed" else "left is smaller"
            charts.append(svg.points(rows, f"{key}, times the baseline's ({better})", "bits per byte", title))
    return charts


def _named(data: Record, place: int) -> tuple[str, str]:
    """The style and the name of a series, as the charts take them."""
    return svg.style(data["series"][place]), data["series"][place]["label"]


def _speeds(data: Record) -> str:
    predicted = ("speed_by_operations", "speed_by_bytes")
    rows = [
        (*_named(data, place), cost["speed"], [value for key in predicted if (value := cost[key]) is not None])
        for place, cost in enumerate(data["costs"])
        if cost is not None and cost["speed"] is not None and not data["series"][place]["baseline"]
    ]
    return svg.marks(rows, "Speed over the baseline's, measured and predicted") if rows else ""


def _claim(data: Record) -> list[Values]:
    """The largest weight of every design that routes, over all sites and over the deep third."""
    rows = []
    for place, depth in enumerate(data["depth"]):
        if depth is None or not any(_known(depth["max_weight"])):
            continue
        sites = zip(depth["max_weight"], depth["deep"], depth["source_count"], strict=True)
        known = [(value, is_deep, 1 / count) for value, is_deep, count in sites if value is not None]
        deep = mean_if_all(value for value, is_deep, _ in known if is_deep)
        uniform = mean_if_all(share for _, is_deep, share in known if is_deep)
        rows.append({"series": place, "all": fmean(value for value, *_ in known), "deep": deep, "uniform": uniform})
    return rows


def _known(values: Sequence[object]) -> list[bool]:
    return [value is not None for value in values]
