"""The smallest group that does not commute."""

from __future__ import annotations

from itertools import permutations

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, integers, only_last

ELEMENTS = tuple(permutations(range(3)))
"""The orders of three things; a token is a place in this list, and 0 is the identity."""


def compose(after: int, before: int) -> int:
    """The token of `before`, then `after`."""
    return ELEMENTS.index(tuple(ELEMENTS[after][place] for place in ELEMENTS[before]))


@register("s3")
class S3(Task):
    """Permutations of three things: answer every one with the product of all so far, the newest applied last.

    S3 does not commute, so that counting tokens does not solve it, as it does parity: the state must be followed step
    by step (or by a tree of products, log2 of the length deep). Hypothesis: as for parity, products of reflections in
    the shortcut (ddl) track it with fewer layers than sums.

    length   permutations a row.
    last     ask at the last one alone.
    """

    separates = "ddl (products of reflections) from additive streams, where counting is no shortcut"

    def __init__(self, *, length: int = 16, last: bool = False) -> None:
        at_least(self.name, 2, length=length)
        self.length, self.last = length, last
        self.answers = self.vocab = len(ELEMENTS)

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        ids = integers(len(ELEMENTS), (size, self.length), generator)
        span = range(len(ELEMENTS))
        products = torch.tensor([[compose(after, before) for before in span] for after in span], device=ids.device)
        states = [ids[:, 0]]
        for token in ids[:, 1:].unbind(1):
            states.append(products[token, states[-1]])
        targets = torch.stack(states, 1)
        return Batch(ids, only_last(targets) if self.last else targets, {})
