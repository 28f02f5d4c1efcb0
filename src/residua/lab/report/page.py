"""render(data): the whole page as one text: style, script, data and pictures inside, nothing fetched from anywhere.

A content-security policy allows the one script and the one style by their hash, and nothing else: no other script, no
request, no frame, no form. Text is escaped by the template, and the data cannot close their element.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from residua._version import __version__
from residua.lab.common.files import Record, Values
from residua.lab.common.tables import times
from residua.lab.diagnose.attention import MOST_OFFSETS
from residua.lab.plots import ladder, rows, svg
from residua.lab.plots.charts import (
    SHARES,
    curve_charts,
    depth_charts,
    designs,
    known,
    measured_in,
    named,
    quality_charts,
    weight_maps,
)
from residua.lab.plots.sizes import size_charts
from residua.lab.report.extra import grid_of
from residua.lab.report.guide import VIEWS
from residua.lab.runs import mean_if_all

HERE = Path(__file__).parent
SCRIPTS = ("core", "chart", "heat", "explorer", "paths", "views")
TABLED = 1500
"""Cells up to which a map is a table too."""
STATIC_TOKENS = 80

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
    css = svg.STYLE + rows.STYLE + (HERE / "style.css").read_text()
    script = _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    views = _views(data)
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
        designs=[{"style": svg.style(each), "label": each["label"]} for each in designs(data)],
        starts={0, *accumulate(len(group["columns"]) for group in (data["summary"] or {"groups": ()})["groups"])},
        figures={
            "forest": _forest(data),
            "sizes": size_charts(data),
            "curves": curve_charts(data) if data["curves"] else [],
            "routing": _maps(data),
            "depth": depth_charts(data, measured),
            "points": quality_charts(data),
            "speeds": _speeds(data),
            "knockouts": [
                each and _knockouts(each, *named(data, place)) for place, each in enumerate(data["knockouts"])
            ],
            "ladder": data["ladder"] and _ladder(data),
            "loops": [each and _passes(each, *named(data, place)) for place, each in enumerate(data["loops"])],
        },
        unrouted=[place for place, each in enumerate(data["routing"]) if each is None],
        regimes=REGIMES,
        regimes_of=_regimes,
        strip=_strip,
        by_offset=_by_offset,
        grid=grid,
        most=TABLED,
        measured=measured,
        ramp=_ramp,
        path_table=_path_table,
        grid_of=grid_of,
        of_prompt=any(
            depth and depth["gradient_of"] == "prompt" and any(known(depth["gradient_norm"])) for depth in data["depth"]
        ),
        claim=_claim(data),
        offsets=MOST_OFFSETS,
        worth=ladder.AXES,
        speedup_words=ladder.in_words,
        ratio=times,
        whole=lambda value: "-" if value is None else f"{value:,.0f}",
        mebibytes=lambda value: "-" if value is None else f"{value / 2**20:,.1f}",
    )


def as_json(value: object) -> str:
    """JSON that no content can turn into markup: the signs that could close or open something are escapes."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def _script() -> str:
    parts = [(HERE / "script" / f"{name}.js").read_text() for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _views(data: Record) -> list[Values]:
    """The views of this page, with what each says for itself."""
    left_out = {"summary", "curves", "knockouts", "costs", "runs"} if data["kind"] == "inspection" else set()
    left_out |= {key for key, view in VIEWS.items() if view.optional and not any(data[key] or ())}
    return [{"key": key, **asdict(view)} for key, view in VIEWS.items() if key not in left_out]


def _forest(data: Record) -> str:
    differences = [] if data["summary"] is None else data["summary"]["differences"]
    return rows.forest([(*named(data, row["series"]), row) for row in differences])


def _maps(data: Record) -> list[Values]:
    routed = [(place, each | {"weights": grid(each, 0)}) for place, each in enumerate(data["routing"]) if each]
    drawn = weight_maps([(data["series"][place]["label"], each) for place, each in routed])
    return [{"series": place, "map": each} for (place, _), each in zip(routed, drawn, strict=True)]


def grid(each: Record, seed: int) -> list[list[float | None]]:
    """[site][source] of the mean over seeds (0) or of a seed (1, 2, ...); None where a site cannot read a source."""
    return grid_of(each, each["means"]["mean"][seed])


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


def _regimes(beta: Record, label: str) -> str:
    shares = [(REGIMES[name], name, values) for name, values in beta["regimes"].items()]
    return svg.stacked(beta["sites"], shares, f"Regimes of beta of {label}")


def _by_offset(part: Record, unit: str, label: str) -> str:
    """One of the two axes: the weights of every site by how many sources or tokens back."""
    most = min(MOST_OFFSETS, max(map(len, part["weights"])))
    cells = [[*row[:most], *[None] * (most - len(row))] for row in part["weights"]]
    title, signed = f"Weight by {unit}s back of {label}", part.get("signed", False)
    return svg.heat(part["sites"], [str(back) for back in range(most)], cells, title, signed=signed)


def _speeds(data: Record) -> str:
    predicted = ("speed_by_operations", "speed_by_bytes")
    found = [
        (*named(data, place), cost["speed"], [value for key in predicted if (value := cost[key]) is not None])
        for place, cost in enumerate(data["costs"])
        if cost is not None and cost["speed"] is not None and not data["series"][place]["baseline"]
    ]
    return rows.speeds(found, "Speed over the baseline's, measured and predicted")


def _claim(data: Record) -> list[Values]:
    """The largest weight of every design that routes, over all sites and over the deep third."""
    found = []
    for place, depth in enumerate(data["depth"]):
        if depth is None or not any(known(depth["max_weight"])):
            continue
        sites = zip(depth["max_weight"], depth["deep"], depth["source_count"], strict=True)
        shares = [(value, is_deep, 1 / count) for value, is_deep, count in sites if value is not None]
        deep = mean_if_all(value for value, is_deep, _ in shares if is_deep)
        uniform = mean_if_all(share for _, is_deep, share in shares if is_deep)
        found.append({"series": place, "all": fmean(value for value, *_ in shares), "deep": deep, "uniform": uniform})
    return found


def _ramp(cells: Sequence[Sequence[float | None]], signed: bool, unit: str = "") -> str:
    """The colours of a map that is drawn on a scale of its own."""
    return svg.ramp(_largest(cells), signed=signed, unit=unit)


def _largest(cells: Sequence[Sequence[float | None]]) -> float:
    return max((abs(value) for row in cells for value in row if value is not None), default=0.0) or 1.0


def _knockouts(each: Record, _: str, label: str) -> Values:
    cells = grid_of(each, each["mean"])
    title = f"Change of the loss of {label} without each source"
    drawn = svg.heat(each["sites"], each["sources"], cells, title, signed=True, digits=3)
    return {"map": drawn, "ramp": _ramp(cells, True, "nats per token"), "cells": cells}


def _passes(each: Record, _: str, label: str) -> Values:
    """One map a pass, all on one scale."""
    largest = max(_largest(cells) for cells in each["weights"])
    maps = [
        svg.heat(
            each["sites"], each["sources"], cells, f"Mean weights of {label} in pass {turn}",
            signed=each["signed"], largest=largest,
        )
        for turn, cells in enumerate(each["weights"], 1)
    ]  # fmt: skip
    return {"maps": maps, "ramp": svg.ramp(largest, signed=each["signed"])}


def _ladder(data: Record) -> Values:
    """The curve by operations, and the speedups on both axes."""
    found = data["ladder"]
    rows_shown = [row for row in found["rows"] if row["compute"] is not None]
    points = [(*named(data, row["series"]), row["compute"], row["loss"]) for row in rows_shown]
    worth = {
        axis: ladder.speedups([(*named(data, row["series"]), row["speedup"][axis]) for row in found["rows"]
                               if row["speedup"][axis] is not None], axis)
        for axis in ladder.AXES
    }  # fmt: skip
    fitted = found["curves"].get("per_token")
    return {"curve": ladder.curve(found["rungs"], fitted, points) if fitted else "", "worth": worth}


def _path_table(each: Record) -> list[tuple[str, list[float | None]]]:
    """(site, [source]) of the last token and its first choice: what is read without script."""
    from array import array

    target = each["targets"][-1]
    numbers, tokens = array("h", base64.b64decode(target["packed"])), len(target["tokens"])
    last = [numbers[cell * tokens + tokens - 1] * target["step"] for cell in range(len(numbers) // tokens)]
    return list(zip(each["sites"], grid_of(each, last), strict=True))
