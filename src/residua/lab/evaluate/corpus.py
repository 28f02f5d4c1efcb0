"""bits per byte = nats per token / ln 2 * tokens per byte, over the validation split of a corpus."""

from __future__ import annotations

from collections.abc import Callable

import torch

from residua.lab.common.files import Values
from residua.lab.data import Tokens
from residua.lab.evaluate.opened import Opened
from residua.lab.train import sampler
from residua.lab.train.loop import loss_numbers
from residua.model import token_loss


@torch.no_grad()
def corpus_loss(
    opened: Opened,
    tokens: Tokens,
    *,
    context: int,
    windows: int = 0,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Values:
    """Loss, perplexity and bits per byte on windows of `context` tokens, evenly spaced; 0 takes the whole split.

    Each window starts without a past, so a longer context flatters a model: the figure belongs to its context.
    """
    if context < 2:
        raise ValueError(f"context={context} must be at least 2")
    if batch < 1 or windows < 0:
        raise ValueError(f"batch={batch} must be at least 1 and windows={windows} not negative")
    if getattr(getattr(opened.model, "config", None), "causal", True) is False:
        raise ValueError("the model is an encoder, which sees the token that it would be asked for; train a causal one")
    if opened.context is not None and context > opened.context:
        raise ValueError(f"the model takes {opened.context} tokens at most; choose a context up to that, not {context}")
    starts = sampler.spread(len(tokens.valid), context, windows)
    if not starts:
        raise ValueError(f"the validation split has {len(tokens.valid)} tokens, fewer than one window of {context}")
    nats, counted = 0.0, 0
    for first in range(0, len(starts), batch):
        inputs, targets = sampler.windows(tokens.valid, starts[first : first + batch], context)
        nats += float(token_loss(opened.logits(inputs), targets)) * targets.numel()
        counted += targets.numel()
        if progress is not None:
            progress(min(first + batch, len(starts)), len(starts))
    return {
        **loss_numbers(nats / counted, len(tokens.valid) / tokens.valid_bytes),
        "tokens": counted,
        "windows": len(starts),
        "context": context,
        "fingerprint": tokens.manifest["fingerprint"],
    }
