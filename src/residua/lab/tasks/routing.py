"""Scoring recorded depth weights against a routing that is known.

    score = max over steps -> sources, strictly rising, of mean over steps of the mean share on the assigned source

Nobody tells a network in which source to put which intermediate result, so the assignment is found; it must rise,
since a later step is deeper. Weights that do not depend on the token give every step the same shares, which add up to
1 over different sources: they score at most 1/m of m steps, whatever they are. Routing that follows the truth scores 1.
Blurred weights may follow the truth and still score below 1/m: `static`, what the same weights score once they are
averaged over the steps, is the level to compare those with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from residua.lab.diagnose.metrics import shares


class RoutingScore(NamedTuple):
    """How well recorded weights follow the true routing."""

    score: float
    chance: float
    """The most that input-independent weights can score: 1 over the number of steps."""
    static: float
    """The score of the same weights averaged over all steps, as if they did not depend on the input."""
    assignment: tuple[int, ...]
    """The source, by place, that each step was found in."""
    lane: int
    """The lane that follows the truth best; its score is the one given."""
    site: str = ""
    """The site, where several were compared."""

    @property
    def above_chance(self) -> float:
        """The score rescaled: 0 (or below) for static weights, 1 for routing that follows the truth."""
        return (self.score - self.chance) / (1 - self.chance)


def routing_score(weights: Float[Tensor, "lane n b t group"], truth: Int[Tensor, "b t"]) -> RoutingScore:
    """Score the weights of one site; `truth` is a step 0 ... m - 1 for every token, -1 where none is right.

    Signed weights count by their size, and the groups of a lane are averaged.
    """
    if weights.shape[2:4] != truth.shape:
        raise ValueError(
            f"weights for {tuple(weights.shape[2:4])} tokens, but truth for {tuple(truth.shape)}: record the batch "
            "that is scored, last"
        )
    steps = int(truth.max()) + 1
    if steps < 2 or any(not (truth == step).any() for step in range(steps)):
        raise ValueError("a routing needs 2 or more steps, 0 ... m - 1, each of them somewhere in truth")
    if weights.shape[1] < steps:
        raise ValueError(f"{steps} steps cannot be in {weights.shape[1]} different sources")
    share = shares(weights).mean(-1)
    rows = torch.stack([share[:, :, truth == step].mean(-1) for step in range(steps)], 1).double().cpu()
    found = [rising_assignment(lane) for lane in rows]
    lane = max(range(len(found)), key=lambda place: found[place][0])
    total, assignment = found[lane]
    static, _ = rising_assignment(rows[lane].mean(0).expand(steps, -1))
    return RoutingScore(total / steps, 1 / steps, static / steps, assignment, lane)


def best_routing(weights: Mapping[str, Float[Tensor, "lane n b t group"]], truth: Int[Tensor, "b t"]) -> RoutingScore:
    """The site that follows the truth best, of all that have sources enough: `best_routing(record.weights(), truth)`.

    The best of many sites is a little above what one would score by luck; the bound on static weights holds for all.
    """
    steps = int(truth.max()) + 1
    scores = {name: routing_score(one, truth) for name, one in weights.items() if one.shape[1] >= steps}
    if not scores:
        raise ValueError(f"no recorded site mixes {steps} sources or more; deepen the model or use fewer steps")
    site = max(scores, key=lambda name: scores[name].score)
    return scores[site]._replace(site=site)


def rising_assignment(table: Float[Tensor, "step n"]) -> tuple[float, tuple[int, ...]]:
    """The strictly rising choice of a column for each row with the largest sum, and the choice."""
    rows = table.tolist()
    best: list[tuple[float, tuple[int, ...]]] = [(value, (place,)) for place, value in enumerate(rows[0])]
    for step, row in enumerate(rows[1:], start=1):
        reached: tuple[float, tuple[int, ...]] = (float("-inf"), ())
        following = []
        for place, value in enumerate(row):
            if place >= step:
                reached = max(reached, best[place - 1], key=lambda one: one[0])
            following.append((reached[0] + value, (*reached[1], place)))
        best = following
    return max(best, key=lambda one: one[0])
