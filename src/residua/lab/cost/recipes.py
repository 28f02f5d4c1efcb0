"""Named sizes as recipes of training: the shapes of `PRESETS`, and rows, rates and types as their papers have them.

Up to 1B as the Delta paper trains from scratch (2605.18855): 32 rows of 2,048 tokens, 10,000 steps, 6e-4, a tenth of
them warm-up; 7.6B with 64 rows, 3e-4, a twentieth, and recomputed blocks. 350M follows the smaller and 3B the larger.
Reads that start as an average of 72 sources, as those of `delta` do there, need an eps below the usual 1e-9.
The vocabulary is that of the tokenizer: the paper's, 151,936, is Qwen's.
"""

from __future__ import annotations

from collections.abc import Mapping

from residua.lab.common.files import Record, Values
from residua.lab.cost.targets import shape_of

SMALL: Record = {
    "context": 2048, "batch": 32, "steps": 10_000, "lr": 6e-4, "warmup_share": 0.1, "dtype": "bfloat16",
}  # fmt: skip
LARGE: Record = {**SMALL, "batch": 64, "lr": 3e-4, "warmup_share": 0.05, "checkpointed": True, "eps": 1e-10}
RECIPES: Mapping[str, Record] = {
    "demo": {}, "220M": SMALL, "350M": SMALL, "533M": SMALL, "1B": SMALL, "3B": LARGE, "7.6B": LARGE,
}  # fmt: skip


def recipe(size: str, given: Record) -> Values:
    """The settings of a size with those that are given over them; one that is no more than a shape has no others."""
    shape = {name: value for name, value in shape_of(size, given).items() if name != "vocab" or name in given}
    return {**shape, **RECIPES.get(size, {}), **given}
