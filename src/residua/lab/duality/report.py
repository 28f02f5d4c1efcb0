"""Everything examined, in one JSON object, and the same as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from residua.lab.common.files import Values
from residua.lab.common.tables import markdown_table
from residua.lab.duality import checks
from residua.lab.duality.models import Subject

PARTS = {
    "theorem": checks.theorem,
    "network": checks.network,
    "instance": checks.instances,
    "condition": checks.conditions,
    "reduction": checks.reductions,
}

CONDITIONS = (
    "the stack is given: no read has had a part in making it",
    "W_Q, W_K and W_V are shared over depth",
    "one normaliser: a softmax over the sources in the window",
    "one scale and one position term",
    "one mask: j <= l and l - j < K",
)


class Objection(NamedTuple):
    """A demand of the review, the answer, and the part of the report that shows it."""

    asked: str
    answer: str
    part: str


OBJECTIONS = (
    Objection(
        "Defining equations of the two operators.",
        "z_l = softmax_j(q_l . k_j / sqrt(e)) v_j over l - K < j <= l, with q, k, v = u W_Q, u W_K, u W_V of a stack u "
        "of sources. The paper's section 2.2 has them; they run here as the design depthswa and the sublayer swa.",
        "theorem",
    ),
    Objection(
        "A test that outputs and gradients match.",
        "They do, for every window from one source to all, by stack and by all three matrices, on drawn and on trained "
        "models, in float64 and float32. The reads inside a trained network match as well.",
        "theorem",
    ),
    Objection(
        "A mapping of each method to the operator.",
        "The table above gives it (`residua designs --map` answers another question: is there a weighted read at all?)"
        ". AttnRes and Delta read with one static query a depth, which is the "
        "operator with queries that are not projected from the stack; DenseFormer, DCA, MUDD and ELC-BERT weigh "
        "sources without a softmax over dot products; Hyper-Connections and DDL keep a recurrent state: no instances.",
        "instance",
    ),
    Objection(
        "The conditions under which the equality holds.",
        "A given stack, weights shared over depth, one normaliser, one scale and position term, one mask. Break any "
        "one, and the two sides part.",
        "condition",
    ),
    Objection(
        "That fixed residual addition is itself ShortSWA.",
        "Not claimed, and not so. Addition is unnormalised ones over deltas, or identity attention over states.",
        "reduction",
    ),
    Objection(
        "That it reduces to uniform residual addition when the weights are the identity.",
        "Identity weights with a window of one give the stream; a uniform softmax gives the mean. Over deltas a norm "
        "turns the mean into the standard network; over states nothing does.",
        "reduction",
    ),
    Objection(
        "That the axes are therefore interchangeable.",
        "The operator is the same and the systems are not: in a network the stack is made by the reads, so depth is "
        "sequential where the sequence is parallel. `residua cost` measures what follows from it.",
        "condition",
    ),
)
"""Objections to the paper that reviewers raised, and what the checks show of each."""


def examine(subjects: Sequence[Subject], *, on_event: Callable[[str], None] | None = None) -> Values:
    """Run every check on every subject."""
    rows: list[Values] = []
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


def summary(report: Values) -> list[Values]:
    """One row per statement and type: the worst of all models, windows and quantities."""
    groups: dict[tuple[str, str, str], list[Values]] = {}
    for row in sorted(report["rows"], key=lambda row: list(PARTS).index(row["part"])):
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


def cells(row: Values) -> tuple[str, ...]:
    """A row of the summary as text."""
    sign = "<=" if row["equal"] else ">="
    return (
        row["part"], row["what"], row["dtype"], f"{row['error']:.1e}", f"{sign} {row['bound']:.0e}", str(row["count"]),
        "pass" if row["passed"] else "FAIL",
    )  # fmt: skip


TITLES = ("part", "statement", "type", "error", "must be", "cases", "")


def as_markdown(report: Values) -> str:
    """The summary as a table, and what would settle it as a list."""
    lines = [
        markdown_table(TITLES, map(cells, summary(report))),
        "",
        "**Objections to the paper, and what the checks show**",
        "",
    ]
    for one in report["settles"]:
        verdict = "shown" if one["passed"] else "NOT SHOWN"
        lines.append(f"- *{one['asked']}* {one['answer']} ({verdict} by the {one['shown_by']} rows.)")
    return "\n".join(lines)
