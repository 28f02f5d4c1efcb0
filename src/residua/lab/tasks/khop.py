"""Lookup in k steps."""

from __future__ import annotations

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, at_most, distinct, integers, unasked


@register("khop")
class KHop(Task):
    """Facts `a b` (a leads to b) in random order, then `a ?k` for k = 1 ... hops: answer where k steps lead.

    The facts of a row form one cycle over `facts` entities, so that each leads to one other, is led to by one other,
    and hops < facts never come back. Distractors are a second cycle that no question starts in.

    Every hop is a lookup that needs the one before it, so that k of them take depth, and each needs the facts as the
    first sublayers saw them. Hypothesis: designs that read early sources again (attnres, delta, mudd, dca) keep their
    accuracy to a larger k at equal depth than a sum does, where the early reads are diluted.

    hops          K: one question for each k up to it, in random order, each from a start of its own.
    facts         entities in the cycle.
    distractors   entities in the other cycle: 0, or at least 2.
    entities      symbols.

    extra: hops [b t], the k of a question; 0 where nothing is asked.
    """

    separates = "designs that read early sources again from the plain sum: accuracy against k at equal depth"

    def __init__(self, *, hops: int = 3, facts: int = 6, distractors: int = 0, entities: int = 16) -> None:
        at_least(self.name, 1, hops=hops)
        at_least(self.name, 2, facts=facts)
        at_least(self.name, 0, distractors=distractors)
        at_most(self.name, facts - 1, "facts - 1: a longer walk comes back to its start", hops=hops)
        if distractors == 1:
            raise ValueError(f"{self.name}: one distractor could only lead to itself; give 0, or 2 and more")
        if facts + distractors > entities:
            raise ValueError(
                f"{self.name}: facts={facts} and distractors={distractors} need {facts + distractors} entities, "
                f"not {entities}"
            )
        self.hops, self.facts, self.distractors, self.entities = hops, facts, distractors, entities
        self.answers, self.vocab = entities, entities + hops
        self.length = 2 * (facts + distractors) + 2 * hops

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        count = self.facts + self.distractors
        entities = distinct(self.entities, size, count, generator)
        cycle, other = entities[:, : self.facts], entities[:, self.facts :]
        leads = torch.cat([cycle.roll(-1, 1), other.roll(-1, 1)], 1)
        order = distinct(count, size, count, generator)
        told = torch.stack([entities.gather(1, order), leads.gather(1, order)], 2).flatten(1)
        start = integers(self.facts, (size, self.hops), generator)
        hops = 1 + distinct(self.hops, size, self.hops, generator)
        asked = torch.stack([cycle.gather(1, start), self.entities + hops - 1], 2).flatten(1)
        ids = torch.cat([told, asked], 1)
        targets, steps = unasked(ids), torch.zeros_like(ids)
        targets[:, 2 * count + 1 :: 2] = cycle.gather(1, (start + hops) % self.facts)
        steps[:, 2 * count + 1 :: 2] = hops
        return Batch(ids, targets, {"hops": steps})
