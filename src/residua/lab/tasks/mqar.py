"""Multi-query associative recall."""

from __future__ import annotations

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, at_most, distinct, integers, unasked


@register("mqar")
class MQAR(Task):
    """k_1 v_1 ... k_n v_n, then `gap` fillers, then keys: answer each with its value.

    The control: recall over tokens is the attention's business, and a depth design must not break it. On the sequence
    axis it asks for reach: with gap >= w, one layer of attention over the last w tokens sees no pair from any query, so
    that a short window alone must fail where one layer of full attention passes.

    pairs     key-value pairs; the keys of a row differ.
    queries   how many of the keys are asked for, each once.
    keys, values   symbols of each sort.
    gap       fillers between the pairs and the first query.

    extra: distance [b t], tokens from a query back to its value; 0 where nothing is asked.
    """

    separates = "full from windowed attention; among depth designs, none: they must not break recall"

    def __init__(self, *, pairs: int = 4, queries: int = 4, keys: int = 16, values: int = 16, gap: int = 0) -> None:
        at_least(self.name, 1, pairs=pairs, queries=queries)
        at_least(self.name, 2, keys=keys, values=values)
        at_least(self.name, 0, gap=gap)
        at_most(self.name, keys, "the number of keys: those of a row differ", pairs=pairs)
        at_most(self.name, pairs, "the number of pairs: each key is asked for once", queries=queries)
        self.pairs, self.queries, self.keys, self.gap = pairs, queries, keys, gap
        self.answers, self.vocab, self.length = values, 1 + keys + values, 2 * pairs + gap + queries

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        keys = 1 + distinct(self.keys, size, self.pairs, generator)
        values = 1 + self.keys + integers(self.answers, (size, self.pairs), generator)
        asked = distinct(self.pairs, size, self.queries, generator)
        facts = torch.stack([keys, values], 2).flatten(1)
        ids = torch.cat([facts, facts.new_zeros(size, self.gap), keys.gather(1, asked)], 1)
        start = self.length - self.queries
        targets, distance = unasked(ids), torch.zeros_like(ids)
        targets[:, start:] = values.gather(1, asked)
        distance[:, start:] = torch.arange(start, self.length, device=ids.device) - (2 * asked + 1)
        return Batch(ids, targets, {"distance": distance})
