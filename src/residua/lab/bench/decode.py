"""Decoding: one read, one step of a short window, and whole models, in microseconds a token."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from residua import ops
from residua.lab.bench import forms
from residua.lab.bench.device import current
from residua.lab.bench.timing import STANDARD, Form, Measured, interleave
from residua.model import Cache, ModelConfig, Transformer

VOCABULARY = 32_000
"""Llama's: the head is a fifth of what a token streams through a small model."""


def measure(
    designs: Sequence[str], *, depth: int, width: int, seconds: float, contexts: Sequence[int] = (1024, 32768)
) -> Measured:
    """A read at batch 1, a window's step after contexts of different lengths, and a token of each design: in our own
    backbone and, where transformers is installed, in a converted Llama."""
    found = {
        "read": _read(24, 1024, seconds / 4),
        "ring": _ring(contexts, seconds / 4),
        "model": _models(designs, depth, width, seconds / 2),
    }
    if importlib.util.find_spec("transformers") is not None and current().type == "cpu":
        found["converted"] = _converted(designs, depth, width, 2 * seconds)  # its bar is a few percent: many rounds
    return found


def _read(n: int, width: int, seconds: float) -> Measured:
    generator = torch.Generator().manual_seed(0)
    sources = tuple(torch.randn(1, 1, width, generator=generator).to(current()) for _ in range(n))
    query = 0.1 * torch.randn(width, generator=generator).to(current())
    timed = {
        "residua": lambda: ops.attend(query, sources, eps=forms.EPS),
        "public": lambda: forms.public_read(query, sources),
    }
    timing = interleave({k: _inference(f) for k, f in timed.items()}, controlled="residua", seconds=seconds)
    return {
        "sources": n,
        "width": width,
        "microseconds": {name: 1e6 * timing.typical(name) for name in timed},
        "ratio": timing.ratio("residua", "public", "residua").to_json(),
    }


def _ring(contexts: Sequence[int], seconds: float) -> Measured:
    """A model of windows alone: a step must cost the same however many tokens lie behind."""
    config = ModelConfig(vocab=64, width=256, depth=2, heads=4, layout="swa:window=128,mlp")
    model = Transformer(config).eval().to(current())
    timed = {str(length): _inference(_token(model, length)) for length in contexts}
    first, *rest = timed
    timing = interleave(timed, controlled=first, seconds=seconds)
    return {
        "window": 128,
        "microseconds": {length: 1e6 * timing.typical(length) for length in timed},
        "over_shortest": {length: timing.ratio(first, length, first).to_json() for length in rest},
    }


def _models(designs: Sequence[str], depth: int, width: int, seconds: float, context: int = 128) -> Measured:
    shape: Measured = {"vocab": VOCABULARY, "width": width, "depth": depth, "heads": max(1, width // 64)}
    weights = Transformer(ModelConfig(**shape)).to(current()).state_dict()
    timed = {}
    for name in dict.fromkeys((STANDARD, *designs)):
        model = Transformer(ModelConfig(**shape, design=name)).to(current())
        timed[name] = _token(_sharing(weights, model), context)
    return {**shape, "context": context, **_over(STANDARD, timed, seconds)}


def _converted(designs: Sequence[str], depth: int, width: int, seconds: float, context: int = 128) -> Measured:
    """A Llama as Hugging Face runs it, and its conversions, with the cache that `generate` uses."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from residua.hf.convert import convert

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=depth,
        num_attention_heads=max(1, width // 64), max_position_embeddings=65536, tie_word_embeddings=True,
    )  # fmt: skip

    weights = LlamaForCausalLM(config).state_dict()

    def token(design: str | None) -> Form:
        model = LlamaForCausalLM(config)
        model = _sharing(weights, model if design is None else convert(model, design, check=False, say=None))
        cache, ids = DynamicCache(config=model.config), torch.zeros(1, context, dtype=torch.long)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        return lambda: model(ids[:, :1], past_key_values=cache)

    timed = {"base": token(None)} | {name: token(name) for name in dict.fromkeys((STANDARD, *designs))}
    shape = {"vocab": VOCABULARY, "width": width, "depth": depth}
    return {**shape, "context": context, **_over("base", timed, seconds)}


def _sharing(weights: dict[str, torch.Tensor], model: Any) -> Any:
    """The model on these weights, where they lie: where a copy lies is worth one percent of a token."""
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    assert not unknown, unknown
    return model.eval()


def _over(first: str, timed: dict[str, Form], seconds: float) -> Measured:
    """Every form against the first of them."""
    timing = interleave({name: _inference(form) for name, form in timed.items()}, controlled=first, seconds=seconds)
    return {
        "microseconds": {name: 1e6 * timing.typical(name) for name in timed},
        f"over_{first}": {name: timing.ratio(first, name, first).to_json() for name in timed if name != first},
    }


def _token(model: Transformer, context: int, chunk: int = 1024) -> Form:
    """One more token after `context` of them. The cache grows by those that are timed: some hundreds."""
    cache, ids = Cache(), torch.zeros(1, context, dtype=torch.long, device=current())
    with torch.inference_mode():
        for part in ids.split(chunk, 1):
            model(part, cache=cache)
    last = ids[:, :1]
    return lambda: model(last, cache=cache)


def _inference(form: Form) -> Form:
    def run() -> None:
        with torch.inference_mode():
            form()

    return run
