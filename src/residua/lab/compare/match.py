"""Equal cost: the MLP width at which a run has the parameters, or the operations, of the baseline."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from residua.lab.train import TrainConfig
from residua.model import ModelConfig, sizes_of

VOCAB = 256
"""Embedding and head are the same for both sides, so that any vocabulary gives the same answer."""


def matched_mlp_width(config: TrainConfig, goal: TrainConfig, match: Literal["params", "flops"]) -> int:
    """The hidden width whose cost is nearest to the goal's; an error where the layout has no MLP to narrow."""
    if "mlp" not in {slot.kind for slot in config.model(VOCAB).slots}:
        raise ValueError(f"match={match} narrows the MLP, and layout {config.layout} has none")
    wanted = _cost(goal.model(VOCAB), config.context, match)

    def cost(mlp_width: int) -> float:
        return _cost(replace(config.model(VOCAB), mlp_width=mlp_width), config.context, match)

    low, high = 1, 64 * config.width
    straight = 1 + math.ceil((wanted - cost(1)) / (cost(2) - cost(1)))  # the cost of MLPs is linear in their width
    if low < straight <= high and cost(straight - 1) < wanted <= cost(straight):
        low = high = straight
    while low < high:  # cost grows with the width: bisect for the first at or above the goal
        middle = (low + high) // 2
        if cost(middle) >= wanted:
            high = middle
        else:
            low = middle + 1
    gaps = {width: abs(cost(width) - wanted) for width in {max(1, low - 1), low}}
    best = min(gaps, key=lambda width: (gaps[width], width))
    if gaps[best] > 0.01 * wanted:
        raise ValueError(
            f"match={match}: {config.design} in {config.layout} costs more than the baseline even with the narrowest "
            "MLP; compare it unmatched or at another size"
        )
    return best


@lru_cache(maxsize=4096)
def _cost(model: ModelConfig, context: int, match: str) -> float:
    sizes = sizes_of(model, tokens=context)
    return sizes.parameters if match == "params" else sizes.flops_per_token
