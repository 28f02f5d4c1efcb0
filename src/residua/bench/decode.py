"""Decoding: one read, one step of a short window, and whole models, in microseconds a token."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from residua import ops
from residua.bench import forms
from residua.bench.timing import Form, interleave
from residua.model import Cache, ModelConfig, Transformer

STANDARD = "standard"


def measure(
    designs: Sequence[str], *, depth: int, width: int, seconds: float, contexts: Sequence[int] = (1024, 32768)
) -> dict[str, Any]:
    """A read at batch 1, a window's step after contexts of different lengths, and a token of each design: in our own
    backbone and, where transformers is installed, in a converted Llama."""
    found = {
        "read": _read(24, 1024, seconds / 4),
        "ring": _ring(contexts, seconds / 4),
        "model": _models(designs, depth, width, seconds / 2),
    }
    if importlib.util.find_spec("transformers") is not None:
        found["converted"] = _converted(designs, depth, width, seconds / 2)
    return found


def _read(n: int, width: int, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sources = tuple(torch.randn(1, 1, width, generator=generator) for _ in range(n))
    query = 0.1 * torch.randn(width, generator=generator)
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


def _ring(contexts: Sequence[int], seconds: float) -> dict[str, Any]:
    """A model of windows alone: a step must cost the same however many tokens lie behind."""
    config = ModelConfig(vocab=64, width=256, depth=2, heads=4, layout="swa:window=128,mlp")
    model = Transformer(config).eval()
    timed = {str(length): _inference(_token(model, length)) for length in contexts}
    first, *rest = timed
    timing = interleave(timed, controlled=first, seconds=seconds)
    return {
        "window": 128,
        "microseconds": {length: 1e6 * timing.typical(length) for length in timed},
        "over_shortest": {length: timing.ratio(first, length, first).to_json() for length in rest},
    }


def _models(designs: Sequence[str], depth: int, width: int, seconds: float, context: int = 128) -> dict[str, Any]:
    timed = {}
    for name in dict.fromkeys((STANDARD, *designs)):
        config = ModelConfig(vocab=1024, width=width, depth=depth, heads=max(1, width // 64), design=name)
        timed[name] = _token(Transformer(config).eval(), context)
    return {"depth": depth, "width": width, "context": context, **_over(STANDARD, timed, seconds)}


def _converted(designs: Sequence[str], depth: int, width: int, seconds: float, context: int = 128) -> dict[str, Any]:
    """A Llama as Hugging Face runs it, and its conversions, with the cache that `generate` uses."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from residua.hf.convert import convert

    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=depth,
        num_attention_heads=max(1, width // 64), max_position_embeddings=65536, tie_word_embeddings=True,
    )  # fmt: skip

    def token(design: str | None) -> Form:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        model = model if design is None else convert(model, design, check=False, say=None)
        cache, ids = DynamicCache(config=model.config), torch.zeros(1, context, dtype=torch.long)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        return lambda: model(ids[:, :1], past_key_values=cache)

    timed = {"base": token(None)} | {name: token(name) for name in dict.fromkeys((STANDARD, *designs))}
    return {"depth": depth, "width": width, "context": context, **_over("base", timed, seconds)}


def _over(first: str, timed: dict[str, Form], seconds: float) -> dict[str, Any]:
    """Every form against the first of them."""
    timing = interleave({name: _inference(form) for name, form in timed.items()}, controlled=first, seconds=seconds)
    return {
        "microseconds": {name: 1e6 * timing.typical(name) for name in timed},
        f"over_{first}": {name: timing.ratio(first, name, first).to_json() for name in timed if name != first},
    }


def _token(model: Transformer, context: int, chunk: int = 1024) -> Form:
    """One more token after `context` of them. The cache grows by those that are timed: some hundreds."""
    cache, ids = Cache(), torch.zeros(1, context, dtype=torch.long)
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
