"""The duality paper's two-way recommendation, what it costs here, and what our own runs say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            *_with(
                _judged("ddl", ddl, "attention over depth", depth),
                [one for one in tasks if one.design.startswith("ddl") and one.name in ("overwrite", "parity")],
            ),
        ),
        Claim(
            "for local adaptive mixing, use a short window over tokens (layout swa,attn,mlp), not over depth",
            PAPER,
            *_with(
                _judged("a window over tokens", swa, "a short convolution or a window over depth", [*static, *depth]),
                [one for one in tasks if "swa" in one.layout and one.name == "delim"],
            ),
        ),
        _system(tokens_costs, depth_costs),
    ]


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


def _judged(name: str, chosen: Sequence[Evidence], others: str, rivals: Sequence[Evidence]) -> tuple[str, str]:
    """A verdict from differences that are beyond their noise, and the files it rests on."""
    if not chosen:
        return "not measured", f"no committed results file has a row for {name}"
    best = min(chosen, key=lambda one: one.effect or 0.0)
    said = f"{name}: {_said(best)}"
    rival = min(rivals, key=lambda one: one.effect or 0.0, default=None)
    if rival is not None:
        said += f"; {others}: {_said(rival)}"
    if best.verdict == "worse" or (rival is not None and rival.verdict == "better" and best.verdict != "better"):
        return "disagrees", said
    if best.verdict == "better":
        ahead = rival is not None and rival.verdict == "better" and (rival.effect or 0) < (best.effect or 0)
        return ("undecided" if ahead else "agrees"), said
    return "undecided", said


def _with(judged: tuple[str, str], tasks: Sequence[Solved]) -> tuple[str, str]:
    """The verdict, and what the tasks say."""
    return judged[0], "; ".join([judged[1], *map(str, tasks)])


def _said(one: Evidence) -> str:
    return f"{placed(one.design, one.layout)} {one.effect:+.4f} nats, {one.verdict}, {one.source}"
