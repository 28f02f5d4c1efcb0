"""Only the last value written to a slot counts."""

from __future__ import annotations

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, at_most, distinct, integers, unasked


@register("overwrite")
class Overwrite(Task):
    """`slot value` writes in random order, a mark, then slots: answer each with the value last written to it.

    What a slot held before must be forgotten. Hypothesis: ddl erases what it writes over (beta near 1: a projection),
    while streams that only add must outweigh or subtract the older values, and lose accuracy with the number of
    writes a slot has seen.

    slots     symbols for slots; every one is written at least once.
    writes    in all; those beyond `slots` overwrite.
    queries   how many of the slots are asked for, each once.
    values    symbols for values.

    extra: writes [b t], how often the slot asked for was written; 0 where nothing is asked.
    """

    separates = "ddl (beta near 1 erases) from streams that only add: accuracy against writes a slot"

    def __init__(self, *, slots: int = 4, writes: int = 12, queries: int = 4, values: int = 16) -> None:
        at_least(self.name, 1, slots=slots, queries=queries)
        at_least(self.name, 2, values=values)
        at_least(self.name, slots, writes=writes)
        at_most(self.name, slots, "the number of slots: each is asked for once", queries=queries)
        self.slots, self.writes, self.queries = slots, writes, queries
        self.answers, self.vocab = values, 1 + slots + values
        self.length = 2 * writes + 1 + queries

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        every = torch.arange(self.slots, device=generator.device).expand(size, -1)
        more = integers(self.slots, (size, self.writes - self.slots), generator)
        slots = torch.cat([every, more], 1).gather(1, distinct(self.writes, size, self.writes, generator))
        values = integers(self.answers, (size, self.writes), generator)
        asked = distinct(self.slots, size, self.queries, generator)
        hits = asked[:, :, None] == slots[:, None, :]
        newest = (hits * torch.arange(1, self.writes + 1, device=hits.device)).argmax(2)
        written = torch.stack([1 + slots, 1 + self.slots + values], 2).flatten(1)
        ids = torch.cat([written, written.new_zeros(size, 1), 1 + asked], 1)
        targets, counts = unasked(ids), torch.zeros_like(ids)
        targets[:, -self.queries :] = 1 + self.slots + values.gather(1, newest)
        counts[:, -self.queries :] = hits.sum(2)
        return Batch(ids, targets, {"writes": counts})
