"""The duality paper's two-way recommendation, what it costs here, and what our own runs say of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from residua.lab.advise.evidence import Evidence, Solved, placed

Costs = Mapping[str, float]
WINDOW = 4

PAPER = "Residual Stream Duality, arXiv 2603.16039"


@dataclass(frozen=True, slots=True)
class Claim:
    """One half of the recommendation."""

    claim: str
    source: str
    measured: str
    """`agrees`, `in part`, `disagrees`, `undecided` or `not measured`."""
    because: str


def claims(
    ours: Sequence[Evidence], tokens_costs: Costs, depth_costs: Costs, tasks: Sequence[Solved] = ()
) -> list[Claim]:
    """Both halves, beside our measurements of them, and the system argument beside the predicted costs of one window in
    either place. The paper itself has no experiment.

    The losses decide; synthetic tasks of what each half is about (`overwrite` and `parity` for a shortcut that can
    erase, `delim` for local mixing) are told beside them.
    """
    ddl = [one for one in ours if one.design.startswith("ddl") and one.layout == "attn,mlp"]
    depth = [one for one in ours if one.design.startswith("depthswa")]
    plain = [one for one in ours if one.design == "standard"]
    swa = [one for one in plain if "swa" in one.layout]
    static = [one for one in plain if "conv" in one.layout or "canon" in one.layout]
    return [
        Claim(
            "to change the shortcut itself, use Deep Delta Learning (ddl), not attention over depth",
            PAPER,
            *_judged(
                "ddl", ddl, "attention over depth", depth,
                (one for one in tasks if one.design.startswith("ddl") and one.name in ("overwrite", "parity")),
            ),
        ),
        Claim(
            "for local adaptive mixing, use a short window over tokens (layout swa,attn,mlp), not over depth",
            PAPER,
            *_judged(
                "a window over tokens", swa, "a short convolution or a window over depth", [*static, *depth],
                (one for one in tasks if "swa" in one.layout and one.name == "delim"),
            ),
        ),
        _system(tokens_costs, depth_costs),
    ]  # fmt: skip


def _system(tokens: Costs, depth: Costs) -> Claim:
    """Where a window over tokens is the cheaper one for this model, and where it is not."""
    compared = {
        "operations": "operations",
        "bytes moved": "bytes_moved_fused",
        "kept for backward": "saved_fused",
        "pipeline cut": "pipeline_cut",
        "decode cache": "decode_cache_added_bytes",
        "context-parallel halo": "halo_bytes",
    }
    cheaper = [title for title, key in compared.items() if tokens[key] < depth[key]]
    dearer = [title for title, key in compared.items() if tokens[key] > depth[key]]
    said = (
        f"cheaper over tokens: {', '.join(cheaper) or 'nothing'}; cheaper over depth: {', '.join(dearer) or 'nothing'}"
    )
    return Claim(
        f"the same window costs less to run over tokens than over depth (here a window of {WINDOW})",
        PAPER,
        "disagrees" if dearer and not cheaper else "in part" if dearer else "agrees",
        f"{said} (predicted by residua cost on the fused path, not measured)",
    )


def _judged(
    name: str, chosen: Sequence[Evidence], others: str, rivals: Sequence[Evidence], tasks: Iterable[Solved]
) -> tuple[str, str]:
    """A verdict from differences that are beyond their noise, the files it rests on, and what the tasks say."""
    best, rival = (min(found, key=lambda one: one.effect or 0.0, default=None) for found in (chosen, rivals))
    if best is None:
        verdict, said = "not measured", f"no committed results file has a row for {name}"
    else:
        said = f"{name}: {_said(best)}" + (f"; {others}: {_said(rival)}" if rival is not None else "")
        beside = rival is not None and rival.verdict == "better"
        if best.verdict == "worse" or (beside and best.verdict != "better"):
            verdict = "disagrees"
        else:
            ahead = rival is not None and beside and (rival.effect or 0) < (best.effect or 0)
            verdict = "agrees" if best.verdict == "better" and not ahead else "undecided"
    return verdict, "; ".join([said, *map(str, tasks)])


def _said(one: Evidence) -> str:
    return f"{placed(one.design, one.layout)} {one.effect:+.4f} nats, {one.verdict}, {one.source}"
