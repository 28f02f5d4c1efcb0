"""published(): what papers and independent runs report of each design: `literature.toml`, checked as it is read."""

from __future__ import annotations

import math
import tomllib
from importlib import resources

from residua.lab.advise.evidence import Evidence
from residua.lab.common.files import Record
from residua.registry import design as registered
from residua.spec import parse

QUANTITIES = ("perplexity", "loss", "difference", "speed")
"""What a row may report, one of them each."""


def published(text: str | None = None) -> list[Evidence]:
    """Every row of the file, or of a text in its form; what is not in that form is an error that names the row."""
    if text is None:
        text = (resources.files("residua.lab.advise") / "literature.toml").read_text(encoding="utf-8")
    found = []
    for group in tomllib.loads(text)["reported"]:
        for row in group["rows"]:
            try:
                found.append(_read({**group, **row}))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"literature.toml, {group.get('source')}: {row}: {error}") from None
    return found


def _read(row: Record) -> Evidence:
    unknown = row.keys() - {"source", "kind", "note", "rows", "design", "millions", *QUANTITIES}
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    given = [name for name in QUANTITIES if name in row]
    if len(given) != 1:
        raise ValueError(f"a row reports one of {', '.join(QUANTITIES)}")
    if row["kind"] not in ("paper", "independent"):
        raise ValueError(f"kind is paper or independent, not {row['kind']!r}")
    if not row["millions"] > 0:
        raise ValueError(f"millions = {row['millions']} must be above 0")
    registered(parse(row["design"])[0])
    speed = row.get("speed")
    return Evidence(
        design=row["design"],
        parameters=row["millions"] * 1e6,
        effect=_effect(row),
        speed=speed[0] / speed[1] if isinstance(speed, list) else speed,
        source=row["source"],
        kind=row["kind"],
        note=row.get("note", ""),
    )


def _effect(row: Record) -> float | None:
    """The design's loss less the standard network's, in nats."""
    if "perplexity" in row:
        standard, own = row["perplexity"]
        return math.log(own / standard)
    if "loss" in row:
        standard, own = row["loss"]
        return own - standard
    return row.get("difference")
