"""Which intermediate result to give is itself part of the input."""

from __future__ import annotations

import torch

from residua.lab.tasks._affine import step_count, trajectory
from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, integers, need_prime, unasked


@register("route-switch")
class RouteSwitch(Task):
    """s_1 ... s_m (a pipeline), then `x f` pairs: answer the flag f with x after the first f steps.

    The steps are additions and multiplications modulo p, told anew in every row. A network that runs the pipeline
    down its depth has all m intermediate results in its sources, and the flag says which of them to read: that is
    the true routing, known for every token, so that the recorded weights can be scored (`routing_score`).

    Hypothesis: one mixture for all tokens (elc, denseformer, vertical) cannot follow the flag, input-dependent
    weights (attnres, delta, mudd, depthswa) can.

    ops       m, at least 2: steps of the pipeline.
    queries   pairs a row.
    modulus   p, a prime.

    extra: route [b t], f - 1 at the flags (0 ... m - 1), -1 where nothing is asked.
    """

    separates = "input-dependent depth weights from static ones; its true routing scores the recorded one"

    def __init__(self, *, ops: int = 3, queries: int = 4, modulus: int = 7) -> None:
        at_least(self.name, 2, ops=ops)
        at_least(self.name, 1, queries=queries)
        need_prime(self.name, modulus)
        self.ops, self.queries, self.modulus = ops, queries, modulus
        self.answers = modulus
        self.vocab = modulus + step_count(modulus) + ops
        self.length = ops + 2 * queries

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        p = self.modulus
        steps = integers(step_count(p), (size, self.ops), generator)
        x = integers(p, (size, self.queries), generator)
        route = integers(self.ops, (size, self.queries), generator)
        every = trajectory(x.flatten(), steps.repeat_interleave(self.queries, 0), p)
        answers = every.gather(1, route.flatten()[:, None]).view_as(x)
        pairs = torch.stack([x, p + step_count(p) + route], 2).flatten(1)
        ids = torch.cat([p + steps, pairs], 1)
        targets, truth = unasked(ids), torch.full_like(ids, -1)
        targets[:, self.ops + 1 :: 2] = answers
        truth[:, self.ops + 1 :: 2] = route
        return Batch(ids, targets, {"route": truth})
