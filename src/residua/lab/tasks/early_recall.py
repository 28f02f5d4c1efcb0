"""A token's own identity, needed after a long computation."""

from __future__ import annotations

import torch

from residua.lab.tasks._affine import step_count, trajectory
from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, integers, need_prime, unasked


@register("early-recall")
class EarlyRecall(Task):
    """x s_1 ... s_k w_1 ... w_m: answer each step s with the value so far, each payload w with (result + w) mod p.

    The steps are additions and multiplications modulo p, which must be carried out one after the other. The answer at
    a payload needs the end of that chain, found late in depth, together with the payload's own identity, which is in
    the embedding and nowhere else: source 0, read again at the end.

    Hypothesis: a sum dilutes the embedding as depth grows (PreNorm dilution), and designs with a read of source 0 do
    not. The depth at which it is needed does not depend on the input, so that static weights (elc, denseformer)
    should do as well as dynamic ones; where they must differ is route-switch.

    chain      k, steps.
    payloads   m.
    modulus    p, a prime.
    trace      ask for the value after every step too; false asks at the payloads alone.

    extra: recall [b t], 1 at the payloads and 0 elsewhere.
    """

    separates = "reads of source 0 (static or dynamic) from the plain sum, whose embedding dilutes with depth"

    def __init__(self, *, chain: int = 6, payloads: int = 4, modulus: int = 7, trace: bool = True) -> None:
        at_least(self.name, 1, chain=chain, payloads=payloads)
        need_prime(self.name, modulus)
        self.chain, self.payloads, self.modulus, self.trace = chain, payloads, modulus, trace
        self.answers = modulus
        self.vocab = 2 * modulus + step_count(modulus)
        self.length = 1 + chain + payloads

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        p = self.modulus
        x = integers(p, (size, 1), generator)
        steps = integers(step_count(p), (size, self.chain), generator)
        payloads = integers(p, (size, self.payloads), generator)
        values = trajectory(x[:, 0], steps, p)
        ids = torch.cat([x, 2 * p + steps, p + payloads], 1)
        targets, recall = unasked(ids), torch.zeros_like(ids)
        if self.trace:
            targets[:, 1 : 1 + self.chain] = values
        targets[:, 1 + self.chain :] = (values[:, -1:] + payloads) % p
        recall[:, 1 + self.chain :] = 1
        return Batch(ids, targets, {"recall": recall})
