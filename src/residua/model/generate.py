"""Decoding: greedy or sampled, one token at a time, with a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from residua.model.cache import Cache
from residua.model.transformer import Transformer


def generate(
    model: Transformer,
    ids: Int[Tensor, "b t"],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
    chunk: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "b n"]:
    """The prompt and up to `tokens` new ones, as ids [b, t + new].

    temperature: 0 is greedy; above 0 samples.
    top_k, top_p: sample from the k most likely tokens, or from the smallest set with probability p.
    stop:        a row that produced this token repeats it; decoding ends when every row has.
    mask:        False where the prompt is padding; prompts of unequal length are padded on the left.
    chunk:       tokens of the prompt that are processed at once; all of them by default.

    Raises ValueError for an empty prompt, one that ends in padding, and options out of range.
    """
    new = list(
        stepwise(
            model, ids, tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, mask=mask, chunk=chunk,
            generator=generator,
        )
    )  # fmt: skip
    return torch.cat([ids, *(token[:, None] for token in new)], 1)


def stepwise(
    model: Transformer,
    ids: Int[Tensor, "b t"],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
    chunk: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, " b"]]:
    """The new tokens of `generate`, one [b] at a time; same arguments, same errors."""
    if ids.shape[1] < 1:
        raise ValueError("a prompt needs at least one token")
    check_sampling(tokens, temperature, top_k, top_p)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("a prompt ends in a token, not in padding; pad on the left")
    cache = Cache()
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    *early, step = ids.split(chunk or ids.shape[1], 1)
    *padded, padding = [None] * (len(early) + 1) if mask is None else mask.split(chunk or ids.shape[1], 1)
    with torch.inference_mode():
        for part, masked in zip(early if tokens else (), padded, strict=False):
            model(part, mask=masked, cache=cache)
    for _ in range(tokens):
        with torch.inference_mode():
            logits = model(step, mask=padding, cache=cache)[:, -1]
            token = _choose(logits, temperature, top_k, top_p, generator)
            if stop is not None:
                token = torch.where(done, stop, token)
                done = done | (token == stop)
        yield token.clone()
        if stop is not None and bool(done.all()):
            return
        step, padding = token[:, None], None


def check_sampling(tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse options out of range: known before a model is there."""
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature={temperature} must be a number from 0 on; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")


def _choose(
    logits: Float[Tensor, "b vocab"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, " b"]:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses p stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
