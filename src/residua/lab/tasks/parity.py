"""The simplest state to track."""

from __future__ import annotations

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, integers, only_last


@register("parity")
class Parity(Task):
    """Bits: answer every one with the parity of all so far.

    One bit flips the state or keeps it: a reflection. Hypothesis: ddl, whose gate reaches beta = 2 (eigenvalue -1 in
    the shortcut itself), needs fewer layers for a given length than a stream that can only add. To measure reach
    beyond the training length, build the task again with a larger `length`.

    length   bits a row.
    last     ask at the last bit alone.
    """

    separates = "ddl (beta near 2: a sign flip in the shortcut) from additive streams: depth needed for a length"

    def __init__(self, *, length: int = 24, last: bool = False) -> None:
        at_least(self.name, 2, length=length)
        self.length, self.last = length, last
        self.answers = self.vocab = 2

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        ids = integers(2, (size, self.length), generator)
        parity = ids.cumsum(1) % 2
        return Batch(ids, only_last(parity) if self.last else parity, {})
