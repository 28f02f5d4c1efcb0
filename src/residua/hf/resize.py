"""resize(backbone, tokens): the tables of a stream get a row for every token, as the embedding has.

T'[i] = T[i]  of tokens that both know,  and new ones as the design starts
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from residua.hf.anatomy import Model
from residua.registry import build
from residua.stream import Stream


def refuse_resize(backbone: Model) -> None:
    """Refuse tables that something else holds beside the backbone."""
    if backbone.stream.takes_ids and not isinstance(backbone.stream, Stream):
        raise ValueError(
            f"{backbone.stream.spec} has a row for every token, in a stream that an adapter has copied; resize the "
            "embeddings before an adapter is added"
        )


@torch.no_grad()
def resize(backbone: Model, tokens: int) -> None:
    """Give a backbone the stream for so many tokens; parameters that are no tables stay the same objects."""
    stream = backbone.stream
    if not stream.takes_ids or stream.plan.vocab == tokens:
        return
    plan = replace(stream.plan, vocab=tokens)
    fresh = build(stream.config, plan)
    fresh.reset()
    memo: dict[int, object] = {id(stream.plan): plan}
    for old, new in zip(stream.parameters(), fresh.parameters(), strict=True):
        memo[id(old)] = old
        if old.shape != new.shape:
            rows = min(len(old), len(new))
            table = nn.Parameter(new.to(old), requires_grad=old.requires_grad)
            table[:rows] = old[:rows]
            memo[id(old)] = table
    backbone.stream = copy.deepcopy(stream, memo)
