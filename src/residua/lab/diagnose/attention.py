"""attention_by_offset(model): what attention of our models looks at, by how many tokens back, while a prompt runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from residua.model import Transformer
from residua.model.sublayers import Heads

MOST_OFFSETS = 16
"""Tokens back that attention is followed to."""


@contextmanager
def attention_by_offset(model: Transformer) -> Iterator[dict[str, list[float]]]:
    """Stand before the mixture of every attention sublayer, for the length of the context, and note its weights."""
    found: dict[str, list[float]] = {}
    watched: list[Any] = [sublayer for sublayer in model.sublayers() if hasattr(sublayer, "attend")]

    def watch(sublayer: Any) -> None:
        inner = sublayer.attend

        def attend(q: Tensor, k: Tensor, v: Tensor, context: Any) -> Tensor:
            tokens, width = v.shape[2:]
            # the mixture of the identity is the mixture: mask, window, positions and biases are all in it
            identity = torch.eye(tokens, -(-tokens // width) * width, dtype=v.dtype, device=v.device)
            with torch.no_grad():
                parts = [inner(q, k, part.expand_as(v), context) for part in identity.split(width, 1)]
            found[replace(sublayer.site, lap=context.lap).name] = by_offset(torch.cat(parts, -1)[..., :tokens])
            return inner(q, k, v, context)

        sublayer.attend = attend
        sublayer.mixed = MethodType(Heads.mixed, sublayer)  # which always asks `attend`, where a kernel may not

    for sublayer in watched:
        watch(sublayer)
    try:
        yield found
    finally:
        for sublayer in watched:
            for name in ("attend", "mixed"):
                vars(sublayer).pop(name, None)


def by_offset(weights: Float[Tensor, "b head t t"]) -> list[float]:
    """The mean weight of the key o tokens back, over the queries that have one; no further back than a window."""
    found = [weights.diagonal(-back, -2, -1).mean().item() for back in range(min(MOST_OFFSETS, weights.shape[-1]))]
    while len(found) > 1 and found[-1] == 0:
        found.pop()
    return found
