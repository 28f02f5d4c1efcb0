"""advise(situation): candidates that fit, in order, and those that do not, with the reason for each.

Only those that a source names for the goal are judged; all are for quality. The order: what surely fits, then what the
nearest evidence says (better, no difference or conflicting, unknown, worse), then the size of the effect. A candidate
without any source is never advised: it is listed as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from residua.counting.shapes import unfilled
from residua.lab.advise.duality import PAPER, WINDOW, Claim, claims
from residua.lab.advise.evidence import Evidence, cited, measured, placed, result_files, results_folder, solved
from residua.lab.advise.literature import published
from residua.lab.advise.paper_claims import Judged, judge
from residua.lab.advise.situation import Situation
from residua.lab.common.files import Values
from residua.lab.cost.predict import Cost, predict
from residua.lab.cost.targets import Target
from residua.plan import parse_layout
from residua.registry import build
from residua.spec import parse


@dataclass(frozen=True, slots=True)
class Candidate:
    """A design in a layout, and the goals that a source names it for."""

    design: str
    layout: str = "attn,mlp"
    goals: Mapping[str, str] = field(default_factory=dict)
    """A goal, and who says that this design serves it."""
    inserts: str = ""
    """The same layout for a checkpoint, where new sublayers must start as nothing."""


_DEPTH = "its sources are earlier layers; "
CANDIDATES = (
    Candidate("delta:blocks=4,gate=alpha", goals={"depth": f"{_DEPTH}arXiv 2605.18855"}),
    Candidate("delta:blocks=4", goals={"depth": f"{_DEPTH}arXiv 2605.18855"}),
    Candidate("attnres:blocks=4", goals={"depth": f"{_DEPTH}arXiv 2603.15031"}),
    Candidate("attnres:blocks=8", goals={"depth": f"{_DEPTH}arXiv 2603.15031"}),
    Candidate("attnres", goals={"depth": f"{_DEPTH}arXiv 2603.15031"}),
    Candidate("mudd:prepost=all", goals={"depth": f"{_DEPTH}arXiv 2502.12170"}),
    Candidate("mudd", goals={"depth": f"{_DEPTH}arXiv 2502.12170"}),
    Candidate("dca:window=2", goals={"depth": f"{_DEPTH}arXiv 2502.06785"}),
    Candidate("denseformer:dilation=4,period=5", goals={"depth": f"{_DEPTH}arXiv 2402.02622"}),
    Candidate("denseformer", goals={"depth": f"{_DEPTH}arXiv 2402.02622"}),
    Candidate("hyper"),
    Candidate("mhc"),
    Candidate("ddl", goals={"shortcut": f"{PAPER}; arXiv 2601.00417"}),
    Candidate("ddl:channels=4", goals={"shortcut": f"{PAPER}; arXiv 2601.00417"}),
    Candidate("depthswa:window=4", goals={"depth": PAPER}),
    Candidate(
        "standard", "swa:window=16,attn,mlp", {"local": PAPER}, inserts="swa:window=16:start=zero,attn,mlp"
    ),
    Candidate(
        "standard", "canon,attn,mlp", {"local": "Canon layers, arXiv 2512.17351"}, inserts="canon:start=zero,attn,mlp"
    ),
    Candidate(
        "standard", "conv,attn,mlp", {"local": f"the short convolution that the window is to replace: {PAPER}"},
        inserts="conv:start=zero,attn,mlp",
    ),
    Candidate(
        "attnres:blocks=4", "swa:window=16,attn,mlp", {"local": PAPER, "depth": f"{_DEPTH}arXiv 2603.15031"},
        inserts="swa:window=16:start=zero,attn,mlp",
    ),
)  # fmt: skip

ORDER = {"better": 0, "conflicting": 1, "no difference seen": 1, "unknown": 2, "worse": 3}
FAR = 10.0
"""Evidence from a model this many times smaller or larger is called far."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One candidate, judged."""

    design: str
    layout: str
    verdict: str
    """What the nearest evidence says of its quality: better, worse, no difference seen, conflicting, unknown."""
    reasons: tuple[str, ...]
    costs: Mapping[str, float]
    """Multiples of the standard network's, and bytes."""
    evidence: tuple[Evidence, ...]
    cautions: tuple[str, ...] = ()
    """Why it may not fit."""
    ruled_out: tuple[str, ...] = ()
    """Why it does not; empty if it does."""

    @property
    def headline(self) -> str:
        """The verdict as a page shows it: where evidence at other sizes decided otherwise, each with its size."""
        decided = [one for one in self.evidence if one.effect is not None and one.decided]
        said = {one.verdict: one for one in reversed(decided)}  # the nearest of each
        if self.verdict in said and len(said) > 1:
            others = [one for one in said.values() if one.verdict != self.verdict]
            told = [said[self.verdict], *others]
            return ", ".join(f"{one.verdict} at {_size(one.parameters)}" for one in told)
        return self.verdict

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"evidence": [one.to_json() for one in self.evidence]}


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that is said."""

    situation: Situation
    ranked: tuple[Advice, ...]
    ruled_out: tuple[Advice, ...]
    claims: tuple[Claim, ...]
    unknown: tuple[str, ...]
    results: tuple[str, ...]
    """Our results files that were read."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "situation": self.situation.to_json(),
            "ranked": [one.to_json() for one in self.ranked],
            "ruled_out": [one.to_json() for one in self.ruled_out],
            "recommendation_of_the_paper": [asdict(one) for one in self.claims],
            "unknown": list(self.unknown),
            "results": list(self.results),
        }


def advise(situation: Situation, results: Path | None = None) -> Answer:
    """Judge every candidate. `results` is a folder of comparisons; our committed ones if not given."""
    folder = results_folder() if results is None else results
    ours = measured(folder)
    known = [*published(), *ours]
    plain = _both(situation, "standard", "attn,mlp")
    serving = [one for one in CANDIDATES if situation.goal in ("quality", *one.goals)]  # quality is everybody's goal
    claimed = judge(folder)
    judged = [_judge(one, situation, known, plain, claimed) for one in serving]
    ranked = sorted((one for one in judged if not one.ruled_out), key=lambda one: _rank(one, situation))
    windows = (
        _costs(situation, "standard", f"swa:window={WINDOW},attn,mlp", plain),
        _costs(situation, f"depthswa:window={WINDOW}", "attn,mlp", plain),
    )
    return Answer(
        situation,
        tuple(one for one in ranked if one.reasons),
        tuple(one for one in judged if one.ruled_out),
        tuple(claims(ours, *windows, tasks=solved(folder))),
        tuple(_unknown(ranked, situation, ours, plain[0].parameters)),
        tuple(cited(file, folder) for file in result_files(folder)),
    )


def _judge(
    candidate: Candidate,
    situation: Situation,
    known: Sequence[Evidence],
    plain: tuple[Cost, Cost],
    claimed: Sequence[Judged],
) -> Advice:
    layout = candidate.inserts if situation.checkpoint and candidate.inserts else candidate.layout
    size = plain[0].parameters
    evidence = sorted(_of(candidate, known), key=lambda one: (abs(math.log(one.parameters / size)), one.kind))
    refused = _refused(candidate.design, layout, situation)
    if refused:
        return Advice(candidate.design, layout, _verdict(evidence), (), {}, tuple(evidence), ruled_out=(refused,))
    costs = _costs(situation, candidate.design, layout, plain)
    against, cautions = _objections(candidate.design, layout, situation, evidence, costs)
    return Advice(
        candidate.design,
        layout,
        _verdict(evidence),
        tuple(_reasons(candidate, situation, evidence, costs, claimed)),
        costs,
        tuple(evidence),
        tuple(cautions),
        tuple(against),
    )


def _refused(design: str, layout: str, situation: Situation) -> str:
    """Why the design cannot be built for this model, or would do nothing in it; empty if it can."""
    try:
        with unfilled():
            stream = build(design, replace(situation.target.config, layout=layout).plan)
    except ValueError as error:
        return str(error)
    idle = not stream.mixes.startswith("nothing") and not any(map(stream.sources, stream.plan.readers))
    return "no site would read a mixture: the model is too shallow" if idle else ""


def _of(candidate: Candidate, known: Sequence[Evidence]) -> list[Evidence]:
    """Evidence for this design in this very layout; where there is none, in one with the same sublayers."""
    wanted, layout = (_identity(candidate.design), _kinds(candidate.layout)), parse_layout(candidate.layout)
    alike = [one for one in known if (_identity(one.design), _kinds(one.layout)) == wanted]
    return [one for one in alike if parse_layout(one.layout) == layout] or alike


def _identity(design: str) -> tuple[str, Values]:
    """A gate that starts at zero does not change what a design can become."""
    name, options = parse(design)
    return name, {key: value for key, value in options.items() if (key, value) != ("gate", "alpha")}


def _kinds(layout: str) -> list[str]:
    """The sublayers of a block, and what they mix inside; a window's length is left open."""
    return [f"{slot.kind} {slot.options.get('local', '')}" for slot in parse_layout(layout)]


def _verdict(evidence: Sequence[Evidence]) -> str:
    """The nearest, unless another of about its size says the opposite."""
    judged = [one for one in evidence if one.effect is not None]
    if not judged:
        return "unknown"
    near = [one for one in judged if 1 / FAR < one.parameters / judged[0].parameters < FAR]
    said = {one.verdict for one in near if one.decided}
    return "conflicting" if len(said) > 1 else judged[0].verdict


@lru_cache(maxsize=256)
def _cost(target: Target, tokens: int, design: str, layout: str, path: str) -> Cost:
    config = replace(target.config, design=design, layout=layout)
    return predict(config, tokens, dtype=torch.bfloat16, path=path, build=target.build)


def _both(situation: Situation, design: str, layout: str) -> tuple[Cost, Cost]:
    """As the reference runs, and in fused kernels."""
    target, tokens = situation.target, situation.tokens
    return _cost(target, tokens, design, layout, "reference"), _cost(target, tokens, design, layout, "fused")


def _costs(situation: Situation, design: str, layout: str, plain: tuple[Cost, Cost]) -> dict[str, float]:
    eager, fused = _both(situation, design, layout)
    return {
        "parameters": eager.parameters / plain[0].parameters,
        "operations": fused.flops / plain[1].flops,
        "bytes_moved_eager": eager.bytes_moved / plain[0].bytes_moved,
        "bytes_moved_fused": fused.bytes_moved / plain[1].bytes_moved,
        "saved_eager": eager.saved_bytes / plain[0].saved_bytes,
        "saved_fused": fused.saved_bytes / plain[1].saved_bytes,
        "pipeline_cut": eager.cut / plain[0].cut,
        "decode_cache_added_bytes": eager.cache_bytes - plain[0].cache_bytes,
        "halo_bytes": eager.halo_bytes,
    }


def _objections(
    design: str, layout: str, situation: Situation, evidence: Sequence[Evidence], costs: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """What rules it out, and what might."""
    against, cautions = [], []
    if situation.checkpoint:
        with unfilled():
            starts = build(design, replace(situation.target.config, layout=layout).plan).starts
        if starts != "standard":
            how = "equals it only up to the eps of its norms" if starts == "eps" else "is another network"
            against.append(f"a converted model {how} before it is trained (residua designs {design}: starts)")
    if situation.memory is not None and costs["saved_eager"] > situation.memory:
        said = f"keeps {costs['saved_eager']:.2f}x the activations as the reference runs"
        if costs["saved_fused"] > situation.memory:
            against.append(f"{said}, and {costs['saved_fused']:.2f}x in fused kernels: residua cost")
        else:
            cautions.append(
                f"{said}; within the limit only in fused kernels ({costs['saved_fused']:.2f}x): residua cost"
            )
    if situation.latency is not None:
        if costs["operations"] > situation.latency:
            against.append(f"needs {costs['operations']:.2f}x the operations even in fused kernels: residua cost")
        ran = sorted((one.speed, one.source) for one in evidence if one.speed)
        told = [f"ran at {speed:.2f}x the speed ({source})" for speed, source in ran]
        if ran and 1 / ran[-1][0] > situation.latency:
            against.append(told[-1])
        elif ran and 1 / ran[0][0] > situation.latency:
            cautions.append(f"{told[0]}, and elsewhere {told[-1]}")
    return against, cautions


def _reasons(
    candidate: Candidate,
    situation: Situation,
    evidence: Sequence[Evidence],
    costs: Mapping[str, float],
    claimed: Sequence[Judged],
) -> list[str]:
    """Each with its source; none at all means that nothing is known."""
    found = []
    if situation.goal in candidate.goals:
        found.append(f"for {situation.goal}: {candidate.goals[situation.goal]}")
    judged = [one for one in evidence if one.effect is not None]
    others = [one for one in judged if one.kind != "ours"]
    ours = [one for one in judged if one.kind == "ours"]
    found += [
        f"{one.effect:+.4f} nats at {_size(one.parameters)}, {one.verdict}: {one.source}"
        + ("" if parse_layout(one.layout) == parse_layout(candidate.layout) else f", in {one.layout}")
        + (f" ({one.note})" if one.note else "")
        for one in (*others[:1], *ours[:1])
    ]
    mine = placed(candidate.design, candidate.layout)
    found += [
        f"{one.verdict} in our runs ({one.measured()}, 95 % interval {one.interval()}: {one.source}): {one.claim.claim}"
        for one in claimed
        if one.claim.own == mine and one.difference is not None
    ]
    if found and situation.parallel == "pipeline":
        found.append(f"a pipeline cut sends {costs['pipeline_cut']:.3g}x the bytes: residua cost")
    if found and situation.parallel == "context":
        halo = costs["halo_bytes"]
        told = f"a halo of {halo:,.0f} bytes a boundary" if halo else "nothing to fetch from other ranks"
        found.append(f"{told}, attention aside: residua cost")
    return found


def _rank(one: Advice, situation: Situation) -> tuple[float, ...]:
    effects = [each.effect for each in one.evidence if each.effect is not None]
    burden = {"pipeline": one.costs["pipeline_cut"], "context": one.costs["halo_bytes"]}.get(situation.parallel, 0.0)
    return (
        len(one.cautions),
        ORDER[one.verdict],
        effects[0] if effects else 0.0,
        burden,
        one.costs["saved_eager"],
    )


def _unknown(ranked: Sequence[Advice], situation: Situation, ours: Sequence[Evidence], parameters: float) -> list[str]:
    """What a reader would like to know and nobody has measured."""
    said = []
    for one in ranked:
        name = placed(one.design, one.layout)
        judged = [each for each in one.evidence if each.effect is not None]
        if not judged:
            said.append(f"{name}: no measured loss is on record here, published or ours")
        elif not 1 / FAR < judged[0].parameters / parameters < FAR:
            near = _size(judged[0].parameters)
            said.append(f"{name}: the nearest evidence is from {near}, and this model has {_size(parameters)}")
        if situation.latency is not None and not any(each.speed for each in one.evidence):
            said.append(f"{name}: no speed is known; it may be slower than its operations say")
    if not ours:
        said.append("none of our own results was found: every quality here is somebody else's, mostly of one seed")
    return said


def _size(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
