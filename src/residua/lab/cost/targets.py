"""Which model is costed: a named size, our own numbers, or the `config.json` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from residua.extras import need
from residua.hf.released.rows import ROWS
from residua.lab.common.expect import expect
from residua.lab.common.files import Record, Values, read_json
from residua.lab.common.size import FORM, read_size
from residua.model.config import ModelConfig
from residua.model.context import Context
from residua.model.norms import LaneNorm
from residua.model.sublayers import Heads
from residua.model.transformer import Transformer
from residua.registry import build

PRESETS: Mapping[str, Mapping[str, int]] = {
    "demo": {"width": 64, "depth": 4, "heads": 4, "vocab": 256},
    "220M": {"width": 768, "depth": 12, "heads": 12, "kv_heads": 4, "mlp_width": 3072, "vocab": 151_936},
    "350M": {"width": 1024, "depth": 24, "heads": 16, "vocab": 50_304},
    "533M": {"width": 1024, "depth": 24, "heads": 16, "kv_heads": 8, "mlp_width": 4096, "vocab": 151_936},
    "1B": {"width": 1280, "depth": 36, "heads": 20, "kv_heads": 4, "mlp_width": 5120, "vocab": 151_936},
    "3B": {"width": 2560, "depth": 32, "heads": 32, "vocab": 50_304, "tied": False},
    "7.6B": {"width": 4096, "depth": 36, "heads": 32, "kv_heads": 8, "mlp_width": 12_288, "vocab": 151_936},
}
"""The shapes of the Delta paper's models (2605.18855), as its parameter counts give them, and our own demo. 350M is the
shape of GPT-2 medium; 3B that of Pythia 2.8B, which MUDD's largest model has (2502.12170)."""

VOCAB = 256
"""Of a size that is given by its numbers alone: bytes, as training has by default."""

_NEEDED = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "intermediate_size")
FOREIGN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "phi3", "smollm3")
"""Hugging Face model types whose blocks are ours: pre-norm, rotary attention and a gated MLP."""

TIED = ("gemma", "smollm3")
"""Those whose head is the embedding where their configuration does not say."""


@dataclass(frozen=True, slots=True)
class Foreigner:
    """A released model, of whose layers no more than their number of parameters is known here."""

    title: str
    design: str
    """Its own."""
    parameters: int
    """Of everything but the design."""


@dataclass(frozen=True, slots=True)
class Target:
    """A configuration and how to build it."""

    config: ModelConfig
    build: Callable[[ModelConfig], Transformer] = Transformer
    foreign: Foreigner | None = None
    """A model whose layers are not ours: only the design is counted, on a backbone of its width and depth."""

    def of(self, design: str) -> Target:
        """The same model with another design."""
        return replace(self, config=replace(self.config, design=design))


def shape_of(size: str, given: Record) -> Values:
    """The shape of a size, named or DEPTHxWIDTH, with the numbers that are given in place of its own."""
    own = PRESETS.get(size) or read_size(size)
    if own is None:
        raise ValueError(f"unknown size {size!r}; choose from {', '.join(PRESETS)}, or write {FORM}")
    shape: Values = dict(own)
    if {"width", "heads"} & set(given):  # what was chosen for another width does not go with this one
        shape.pop("kv_heads", None)
        shape.pop("mlp_width", None)
    return shape | dict(given)


def sized(name: str = "220M", **changes: Any) -> Target:
    """A named size or DEPTHxWIDTH, with the numbers that are given in place of its own."""
    given = {key: value for key, value in changes.items() if value is not None}
    fields: Values = {"vocab": VOCAB, "eps": 0.0, **shape_of(name, given)}
    return Target(ModelConfig(**fields))


def from_hugging_face(path: Path | str, **changes: Any) -> Target:
    """The model that a `config.json` (or the folder that holds it) describes; nothing is downloaded or allocated."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    values = read_json(file)
    if values.get("model_type") in ROWS:
        return released(values, **changes)
    values = values.get("text_config") or values
    kind = values.get("model_type")
    if kind not in FOREIGN:
        raise ValueError(f"{file}: cost knows the model types {', '.join((*FOREIGN, *ROWS))}, not {kind!r}")
    try:
        expect(file, values, {f"{key}?": int for key in _NEEDED})
        width, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        if heads < 1:
            raise ValueError(f"{file}: num_attention_heads must be at least 1, not {heads}")
        config = ModelConfig(
            vocab=int(values["vocab_size"]),
            width=width,
            depth=int(values["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            mlp_width=int(values["intermediate_size"]),
            tied=bool(values.get("tie_word_embeddings", kind in TIED)),
            qk_norm=kind == "qwen3",
            eps=0.0,
            **{key: value for key, value in changes.items() if value is not None},
        )
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]!r}, which a {kind} model needs") from None
    head_width = int(values.get("head_dim") or width // heads)
    bias = kind == "qwen2" or bool(values.get("attention_bias"))
    if head_width == width // heads and not bias:
        return Target(config)
    return Target(config, lambda chosen: Foreign(chosen, head_width, bias, output_bias=bias and kind != "qwen2"))


def released(values: Record, **changes: Any) -> Target:
    """A released model by its `config.json`: its own design, on a backbone of ours as wide and as deep."""
    need("hf", "transformers")
    import torch
    from transformers import AutoConfig

    if changes.get("layout") not in (None, "attn,mlp"):
        raise ValueError(f"{ROWS[values['model_type']].title} has its own sublayers; leave out --layout")
    row, whole = ROWS[values["model_type"]], AutoConfig.for_model(**values)
    config = whole.get_text_config()
    plan = row.plan(config)
    with torch.device("meta"):
        stream, total = build(row.design(config), plan), sum(each.numel() for each in row.build(whole).parameters())
    own = sum(each.numel() for each in stream.parameters())
    shape = ModelConfig(vocab=plan.vocab, width=plan.width, depth=plan.depth, heads=1, eps=0.0)
    return Target(shape, foreign=Foreigner(row.title, stream.spec, total - own))


class Foreign(Transformer):
    """Our backbone with heads of another width, or biases on their projections: for counting, not for running."""

    def __init__(self, config: ModelConfig, head_width: int, bias: bool, output_bias: bool) -> None:
        super().__init__(config)
        self.head_width = head_width
        for part in self.sublayers():
            if isinstance(part, Heads):
                heads, shared = (layer.weight.shape[0] // part.head_width for layer in (part.q, part.k))
                part.head_width = head_width
                part.q = nn.Linear(config.width, heads * head_width, bias=bias)
                part.k = nn.Linear(config.width, shared * head_width, bias=bias)
                part.v = nn.Linear(config.width, shared * head_width, bias=bias)
                part.o = nn.Linear(heads * head_width, config.width, bias=output_bias)
                if config.qk_norm:
                    part.q_norm = LaneNorm(head_width, 1, config.eps)
                    part.k_norm = LaneNorm(head_width, 1, config.eps)

    def context(self, *args: Any, **kwargs: Any) -> Context:
        found = super().context(*args, **kwargs)
        cos, sin = (one.new_empty(*one.shape[:-1], self.head_width // 2) for one in found.rotation)
        return replace(found, rotation=(cos, sin))
