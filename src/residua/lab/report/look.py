"""look(model, ids): what a trained model does on one prompt: every token's weights, gradients, attention by offset.

The routing of a comparison is a mean over validation text. Here the tokens are kept apart, and the gradient of the
prompt's own loss is sent back once. The process is set so that the numbers are the same on every machine of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from residua import ops
from residua.lab.common.files import Values
from residua.lab.diagnose import record_routing
from residua.lab.train import TrainConfig
from residua.lab.train.reproducible import reproducible
from residua.model import Transformer, token_loss

MOST_OFFSETS = 16
"""Tokens back that attention is followed to."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    record: Values
    """As `residua compare` keeps it of a run: the summary, with gradients, and the mean weights by site."""
    weights: dict[str, Float[Tensor, "lane n t group"]]
    attention: dict[str, list[float]]
    """Site of an attention sublayer -> mean weight 0, 1, 2, ... tokens back."""


def look(model: Transformer, ids: Int[Tensor, "1 t"]) -> Look:
    """Run one prompt forward and back."""
    with (
        # the same sums whatever the process is set to, and the definitions of the ops
        reproducible(TrainConfig(threads=1)),
        ops.backend("reference"),
        _attention_by_offset(model) as attention,
        record_routing(model, gradients=True) as record,
    ):
        logits = model(ids)
        # a decoder is asked for the next token; an encoder, which sees it, for the token itself
        loss = token_loss(logits[:, :-1], ids[:, 1:]) if model.config.causal else token_loss(logits, ids)
        if ids.shape[1] > 1 or not model.config.causal:
            loss.backward()
    model.zero_grad(set_to_none=True)
    weights = {name: each.detach()[:, :, 0] for name, each in record.weights().items()}
    means = {name: each.mean((0, 2, 3)).tolist() for name, each in weights.items()}
    return Look(record.summary() | {"mean_weights": means}, weights, attention)


@contextmanager
def _attention_by_offset(model: Transformer) -> Iterator[dict[str, list[float]]]:
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

    for sublayer in watched:
        watch(sublayer)
    try:
        yield found
    finally:
        for sublayer in watched:
            vars(sublayer).pop("attend", None)


def by_offset(weights: Float[Tensor, "b head t t"]) -> list[float]:
    """The mean weight of the key o tokens back, over the queries that have one; no further back than a window."""
    found = [weights.diagonal(-back, -2, -1).mean().item() for back in range(min(MOST_OFFSETS, weights.shape[-1]))]
    while len(found) > 1 and found[-1] == 0:
        found.pop()
    return found
