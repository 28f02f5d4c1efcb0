"""What a model is trained on: the next token (decoder) or hidden tokens (encoder)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from residua import ops

IGNORED = -100
"""The target of a position that does not count."""


def token_loss(logits: Float[Tensor, "b t vocab"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean cross entropy in nats over the positions whose target is not `IGNORED`; 0 if there are none."""
    total = F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1),
        targets.flatten(), ignore_index=IGNORED, reduction="sum",
    )  # fmt: skip
    return total / _counted(targets)


def read_loss(
    x: Float[Tensor, "b t d"], weight: Float[Tensor, "vocab d"], targets: Int[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """`token_loss` of the logits W x, of which only some are there at a time."""
    return ops.unembed_loss(x.flatten(0, 1), weight, targets.flatten(), ignored=IGNORED) / _counted(targets)


def _counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum().clamp_min(1)


def mask_tokens(
    ids: Int[Tensor, "b t"],
    *,
    mask_id: int,
    vocab: int,
    share: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Inputs and targets of masked language modelling.

    `share` of the tokens become targets: 80 % of them are shown as `mask_id`, 10 % as a random token and 10 % as
    they are. All other targets are `IGNORED`.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must be above 0 and at most 1")
    chance = torch.rand(ids.shape, generator=generator, device=ids.device)
    hidden = chance < share
    inputs = torch.where(chance < 0.8 * share, mask_id, ids)
    random = torch.randint(vocab, ids.shape, generator=generator, device=ids.device)
    inputs = torch.where((chance >= 0.8 * share) & (chance < 0.9 * share), random, inputs)
    return inputs, torch.where(hidden, ids, IGNORED)
