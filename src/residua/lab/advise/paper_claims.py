"""Claims about residual streams beside what our results say: the table that opens `docs/findings.md`.

    gap_s = own_s - against_s for every seed s       holds, contradicted: the interval leaves out zero, on which side
                                                     does not show: it does not
                                                     undecided: the two halves of the seeds disagree, or the
                                                     rates lost more than what is claimed

p-values of the claims that one results file answers are corrected together (Holm); `paper_claims.toml` has the claims.
A comparison that is not finished answers the claims whose rows have seeds enough for an interval, and says so; the
others count as tests too.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Literal

from residua.lab.advise.evidence import by_seed, cited, placed
from residua.lab.common.files import Record, Values
from residua.lab.common.halves import halves, kept
from residua.lab.common.stats import ALPHA, FEWEST, Difference, holm, paired

DEPTH = "depth"
"""As a size: how the difference changes with every doubling of the depth."""
UNITS = {"loss": "nats", "weight": "of the weight", "gradient": "decades of the gradient norm"}
KEYS = {"loss": "loss", "weight": "deep_max_weight", "gradient": "gradient_norm"}
"""Where a run of a results file has what a claim measures."""
FILES = ("results.json", "conversions.json")
"""What a comparison of designs leaves, and one of conversions."""
Verdict = Literal["holds", "contradicted", "does not show", "undecided", "not run yet", "cannot be tested here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """One entry of the list, as `paper_claims.toml` describes it."""

    claim: str
    who: str
    results: str = ""
    measure: Literal["loss", "weight", "gradient"] = "loss"
    own: str = ""
    against: str = ""
    size: str = ""
    expect: Literal["lower", "higher"] = "lower"
    note: str = ""
    headline: bool = False
    """Whether the README shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim with what our results say of it."""

    claim: PaperClaim
    verdict: Verdict
    difference: Difference | None = None
    halves: tuple[float, float] | None = None
    """The mean difference of either half of the seeds."""
    source: str = ""
    command: str = ""
    planned: int = 0
    """The seeds that an unfinished comparison will have; 0 of a finished one."""
    doubt: str = ""
    """Why the verdict is not what the interval alone says: many claims, halves that disagree, rates that lost more."""

    def measured(self) -> str:
        """The mean difference and over how many seeds; what would measure it, or why nothing can."""
        if self.difference is None:
            return self.claim.note or (f"recipes/{self.claim.results}.toml" if self.claim.results else "")
        doubling = " a doubling" if self.claim.size == DEPTH else f" at {self.claim.size}" if self.claim.size else ""
        unit = UNITS[self.claim.measure]
        so_far = f" so far, of {self.planned}" if self.planned else ""
        doubt = f"; {self.doubt}" if self.doubt else ""
        return f"{self.difference.mean:+.4f} {unit}{doubling}, {self.difference.seeds} seeds{so_far}{doubt}"

    def interval(self) -> str:
        """At 95 %, of the mean; none below three seeds."""
        gap = self.difference
        return "" if gap is None or gap.low is None else f"{gap.low:+.4f} to {gap.high:+.4f}"

    def to_json(self) -> Values:
        """Plain values."""
        return {
            "claim": self.claim.claim,
            "who": self.claim.who,
            "measured": self.measured(),
            "interval": self.interval(),
            "halves": self.halves,
            "verdict": self.verdict,
            "source": self.source,
            "command": self.command,
        }


def paper_claims() -> list[PaperClaim]:
    """The list that ships with the package."""
    text = resources.files("residua.lab.advise").joinpath("paper_claims.toml").read_text(encoding="utf-8")
    return [PaperClaim(**entry) for entry in tomllib.loads(text)["claim"]]


def judge(folder: Path, listed: Sequence[PaperClaim] | None = None) -> list[Judged]:
    """Every claim, in the order of the list, judged by the comparisons in a folder of results.

    Raises ValueError for a results file that cannot be read and for a claim about a row that its table does not have.
    """
    listed = paper_claims() if listed is None else listed
    found: dict[int, Judged] = {}
    for name in dict.fromkeys(claim.results for claim in listed):
        mine = [(place, claim) for place, claim in enumerate(listed) if claim.results == name]
        file = next((each for kind in FILES if (each := folder / name / kind).exists()), None)
        if not name or file is None:
            verdict: Verdict = "not run yet" if name else "cannot be tested here"
            found |= {place: Judged(claim=claim, verdict=verdict) for place, claim in mine}
            continue
        found |= dict(
            zip([place for place, _ in mine], _answered([claim for _, claim in mine], file, folder), strict=True)
        )
    return [found[place] for place in range(len(listed))]


def _broken(claim: PaperClaim, results: Record) -> set[str]:
    """Which of the claim's two rows are not in the table because a seed of them diverged."""
    labels = [one["label"].split(" | ") for one in results.get("diverged", ()) if one["folder"].startswith("runs/")]
    lost = {parts[0] for parts in labels if claim.size in ("", DEPTH) or len(parts) == 1 or claim.size in parts[1:]}
    return {name for name in (claim.own, claim.against) if name.partition(" in ")[0] in lost}


def _owed(claim: PaperClaim, results: Record) -> list[Record]:
    """What an unfinished comparison still owes the rows of a claim."""
    left, plan = results.get("unfinished"), results.get("plan", {})
    if left is None:
        return []
    baseline = placed(plan["baseline"] or plan["designs"][0], plan["layouts"][0])
    names = {claim.own, claim.against or baseline}
    own = [row for row in left["rows"] if placed(row["design"], row["layout"]) in names]
    return [row for row in own if claim.size in ("", DEPTH, row["size"])]


def _waiting(claim: PaperClaim, results: Record) -> str:
    """Why a claim cannot be judged yet; empty where it can."""
    few = [row for row in _owed(claim, results) if row["seeds"] < FEWEST]
    said = ", ".join(f"{row['label']} {row['seeds']} of {row['of']} seeds" for row in few)
    return f"unfinished: {said}" if few else ""


def _answered(listed: Sequence[PaperClaim], file: Path, folder: Path) -> list[Judged]:
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        waiting = [_waiting(claim, results) for claim in listed]
        broken = [_broken(claim, results) for claim in listed]
        gaps = [
            [] if late or lost else _gaps(claim, results)
            for claim, late, lost in zip(listed, waiting, broken, strict=True)
        ]
        planned = [max((row["of"] for row in _owed(claim, results)), default=0) for claim in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not answer its claims: {error}") from None
    whole = [paired(each, [0.0] * len(each)) if each else None for each in gaps]
    known = [gap.p for gap in whole if gap is not None and gap.p is not None]
    tests = [*known, *(1.0 for late in waiting if late)]
    adjusted = iter(holm(tests))
    found = []
    for claim, late, lost, each, gap, count in zip(listed, waiting, broken, gaps, whole, planned, strict=True):
        if gap is None:
            one = Judged(claim=replace(claim, note=late or "a seed diverged"), verdict=_unmeasured(claim, late, lost))
        else:
            one = _judged(claim, each, gap, None if gap.p is None else next(adjusted), len(tests))
            one = replace(one, planned=count)
            if doubt := _mistuned(claim, gap, results):
                one = replace(one, verdict="undecided", doubt=doubt)
        found.append(replace(one, source=cited(file, folder), command=results["command"]))
    return found


def _unmeasured(claim: PaperClaim, late: str, lost: set[str]) -> Verdict:
    """Of a claim without a difference: a row that broke has no loss, and the largest gradient that there can be."""
    if late:
        return "not run yet"
    if claim.measure != "gradient" or len(lost) > 1:
        return "undecided"
    return "holds" if (lost == {claim.own}) == (claim.expect == "higher") else "contradicted"


def _judged(claim: PaperClaim, gaps: Sequence[float], whole: Difference, adjusted: float | None, tests: int) -> Judged:
    significant = None if adjusted is None else adjusted <= ALPHA
    borne_out = kept(gaps, significant)
    verdict: Verdict = "does not show"
    if not borne_out:
        verdict = "undecided"
    elif significant:
        verdict = "holds" if (whole.mean < 0) == (claim.expect == "lower") else "contradicted"
    parts = halves(gaps)
    one = Judged(
        claim=claim,
        verdict=verdict,
        difference=whole,
        halves=(fmean(parts[0]), fmean(parts[1])) if all(parts) else None,
    )
    return replace(one, doubt=_doubted(one, adjusted, tests))


def _doubted(one: Judged, adjusted: float | None, tests: int) -> str:
    """What is weighed beside the interval: the other claims of the file, and the halves of the seeds."""
    gap, undecided = one.difference, one.verdict == "undecided"
    if gap is None or adjusted is None:
        return ""
    if adjusted <= ALPHA:
        means = one.halves or ()
        return f"halves of the seeds disagree, {' and '.join(f'{mean:+.4f}' for mean in means)}" if undecided else ""
    if not gap.significant and not undecided:
        return ""
    among = f" among {tests} claims" if tests > 1 else ""
    half = ", but one half of the seeds would be" if undecided else ""
    return f"not significant{among} (p {adjusted:.2f}){half}"


def _mistuned(claim: PaperClaim, gap: Difference, results: Record) -> str:
    """What the check of the rule that carried the rates found, where that is more than the claim is about.

    A claim about a trend is about the difference between the first and the last depth.
    """
    ladder = results.get("ladder")
    if claim.measure != "loss" or not claim.size or not ladder or claim.size == ladder["tuned_at"]:
        return ""
    doublings = _doublings(_sizes(claim, results)) if claim.size == DEPTH else [0.0, 1.0]
    change = abs(gap.mean) * (max(doublings) - min(doublings))
    failed = [row for row in ladder["check"] if not row["holds"] and (row["lost"] is None or row["lost"] > change)]
    if claim.size != DEPTH:
        failed = [row for row in failed if row["label"].split(" | ")[-1] == claim.size]
    costs = ", ".join(
        f"{row['label']} {'all' if row['lost'] is None else format(row['lost'], '.3f')}" for row in failed
    )
    return f"the carried rates lost more than that: {costs}" if failed else ""


def _sizes(claim: PaperClaim, results: Record) -> list[str]:
    return [row["size"] for row in results["rows"] if row["baseline"]] if claim.size == DEPTH else [claim.size]


def _doublings(sizes: Sequence[str]) -> list[float]:
    return [math.log2(int(size.partition("x")[0])) for size in sizes]


def _gaps(claim: PaperClaim, results: Record) -> list[float]:
    """Own less against, seed by seed; for `depth` the slope of that over the logarithm of the depth."""
    sizes = _sizes(claim, results)
    by_size = {size: _paired_at(claim, size, results) for size in sizes}
    seeds = sorted(set.intersection(*(set(each) for each in by_size.values())))
    if claim.size != DEPTH:
        return [by_size[claim.size][seed] for seed in seeds]
    steps = _doublings(sizes)
    return [_slope(steps, [by_size[size][seed] for size in sizes]) for seed in seeds]


def _paired_at(claim: PaperClaim, size: str, results: Record) -> dict[int, float]:
    rows = [row for row in results["rows"] if not size or row["size"] == size]
    own = _one(rows, claim.own)
    against = _one(rows, claim.against) if claim.against else next(row for row in rows if row["baseline"])
    mine, other = (by_seed(row["label"], KEYS[claim.measure], results) for row in (own, against))
    if claim.measure == "gradient":
        mine, other = ({seed: math.log10(norm) for seed, norm in each.items()} for each in (mine, other))
    return {seed: mine[seed] - other[seed] for seed in mine.keys() & other.keys()}


def _one(rows: Sequence[Record], name: str) -> Record:
    for row in rows:
        if placed(row["design"], row["layout"]) == name:
            return row
    raise ValueError(f"no row {name!r}; there are {', '.join(placed(row['design'], row['layout']) for row in rows)}")


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line."""
    middle = fmean(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
