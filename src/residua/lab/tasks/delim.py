"""A function of the last few tokens, asked for at delimiters."""

from __future__ import annotations

from typing import Literal

import torch

from residua.lab.tasks.registry import register
from residua.lab.tasks.task import Batch, Task, at_least, integers, unasked


@register("delim")
class Delim(Task):
    """Runs of symbols, each closed by a delimiter: answer the delimiter with f of the `reach` symbols before it.

    A run has reach to reach + slack symbols, so that a position alone does not tell where the delimiters are, and
    everything before the last `reach` tokens is noise.

    Hypothesis: this belongs to the sequence axis. One sublayer of attention over the last w tokens (the delimiter
    counted) sees all it needs iff w > reach; with a shorter window one sublayer cannot do better than chance, and
    depth designs gain nothing.

    reach     n: how far back the answer looks.
    slack     how much longer than that a run may be.
    symbols   p: different symbols.
    length    tokens a row, at least one whole run.
    rule      copy: the symbol n places back. sum: the sum of the n symbols, modulo p.

    extra: run [b t], symbols of the run that a delimiter closes; 0 where nothing is asked.
    """

    separates = "window w > reach from w <= reach on the sequence axis; among depth designs, none"

    def __init__(
        self,
        *,
        reach: int = 4,
        slack: int = 4,
        symbols: int = 8,
        length: int = 48,
        rule: Literal["copy", "sum"] = "copy",
    ) -> None:
        at_least(self.name, 1, reach=reach)
        at_least(self.name, 0, slack=slack)
        at_least(self.name, 2, symbols=symbols)
        at_least(self.name, reach + slack + 1, length=length)
        if rule not in ("copy", "sum"):
            raise ValueError(f"{self.name}: rule is copy or sum, not {rule!r}")
        self.reach, self.slack, self.rule = reach, slack, rule
        self.answers, self.vocab, self.length = symbols, symbols + 1, length

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        ids = integers(self.answers, (size, self.length), generator)
        most = self.length // (self.reach + 1)
        runs = self.reach + integers(self.slack + 1, (size, most), generator)
        places = (runs + 1).cumsum(1) - 1
        row, run = (places < self.length).nonzero(as_tuple=True)
        place = places[row, run]
        if self.rule == "copy":
            answers = ids[row, place - self.reach]
        else:
            back = torch.arange(1, self.reach + 1, device=ids.device)
            answers = ids[row[:, None], place[:, None] - back].sum(1) % self.answers
        targets, lengths = unasked(ids), torch.zeros_like(ids)
        targets[row, place], lengths[row, place] = answers, runs[row, run]
        ids[row, place] = self.answers
        return Batch(ids, targets, {"run": lengths})
