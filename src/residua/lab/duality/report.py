"""Everything examined, in one JSON object, and the same as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from residua.lab.duality import checks
from residua.lab.duality.models import Subject
from residua.lab.duality.review import OBJECTIONS

PARTS = {
    "theorem": checks.theorem,
    "network": checks.network,
    "instance": checks.instances,
    "condition": checks.conditions,
    "reduction": checks.reductions,
}
NAMES = list(PARTS)

Json = dict[str, Any]
"""Plain values, as the report holds them."""

CONDITIONS = (
    "the stack is given: no read has had a part in making it",
    "W_Q, W_K and W_V are shared over depth",
    "one normaliser: a softmax over the sources in the window",
    "one scale and one position term",
    "one mask: j <= l and l - j < K",
)


def examine(subjects: Sequence[Subject], *, on_event: Callable[[str], None] | None = None) -> Json:
    """Run every check on every subject."""
    rows: list[Json] = []
    for subject in subjects:
        if on_event is not None:
            on_event(subject.name)
        for part in PARTS.values():
            rows += [row.to_json() for row in part(subject)]
    shown = {part: all(row["passed"] for row in rows if row["part"] == part) for part in {row["part"] for row in rows}}
    return {
        "format": 1,
        "conditions": list(CONDITIONS),
        "models": [
            {"name": subject.name, "trained": subject.trained, "sources": len(subject.given.stack)}
            for subject in subjects
        ],
        "rows": rows,
        "settles": [
            {"asked": one.asked, "answer": one.answer, "shown_by": one.part, "passed": shown[one.part]}
            for one in OBJECTIONS
        ],
        "versions": {"torch": torch.__version__},
        "passed": all(row["passed"] for row in rows),
    }


def summary(report: Json) -> list[Json]:
    """One row per statement and type: the worst of all models, windows and quantities."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in sorted(report["rows"], key=lambda row: NAMES.index(row["part"])):
        groups.setdefault((row["part"], row["what"], row["dtype"]), []).append(row)
    return [
        {
            "part": part,
            "what": what,
            "dtype": dtype,
            "error": (max if rows[0]["equal"] else min)(row["error"] for row in rows),
            "equal": rows[0]["equal"],
            "bound": rows[0]["bound"],
            "count": len(rows),
            "passed": all(row["passed"] for row in rows),
        }
        for (part, what, dtype), rows in groups.items()
    ]


def cells(row: Json) -> tuple[str, ...]:
    """A row of the summary as text."""
    sign = "<=" if row["equal"] else ">="
    return (
        row["part"], row["what"], row["dtype"], f"{row['error']:.1e}", f"{sign} {row['bound']:.0e}", str(row["count"]),
        "pass" if row["passed"] else "FAIL",
    )  # fmt: skip


TITLES = ("part", "statement", "type", "error", "must be", "cases", "")


def as_markdown(report: Json) -> str:
    """The summary as a table, and what would settle it as a list."""
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in summary(report)]
    lines += ["", "**What would settle it**", ""]
    for one in report["settles"]:
        verdict = "shown" if one["passed"] else "NOT SHOWN"
        lines.append(f"- *{one['asked']}* {one['answer']} ({verdict} by the {one['shown_by']} rows.)")
    return "\n".join(lines)
