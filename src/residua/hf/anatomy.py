"""What a decoder layer is made of: one row per architecture, and no copied forward.

A layer is parts in order, each `state <- write(state, post(sublayer(norm(read(state)))))`. A row names the attributes:

    Part("attn", "self_attn", norm="input_layernorm")       a norm before the sublayer; `post` is applied after it

To add an architecture, read the `forward` of its decoder layer, write its row into `ANATOMY` under its `model_type`,
and add a tiny configuration of it to `tests/hf/models.py`: the contract tests then run over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from residua.plan import LANES, Plan, Slot, parse_layout

Config = Any
"""A configuration of transformers, whose attributes its architecture decides."""

Model = Any
"""A model of transformers, or one of its modules."""

Tokenizer = Any
"""One of transformers' tokenizers."""

Class = Any
"""One of transformers' classes, or one made from it at run time."""

Argument = Any
"""What transformers passes on through a method, and is passed on here."""

PREFIX = "residua_"
"""Of the model type of a converted model: `residua_llama`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sublayer of a decoder layer, by the names of its attributes."""

    kind: str
    """`attn` or `mlp`."""
    sublayer: str
    norm: str | None = None
    """Applied to what is read; None where the sublayer takes the stream as it is."""
    post: str | None = None
    """Applied to what the sublayer made: a norm or a dropout."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One projection that makes q, k and v: `groups` times (q, k, v) side by side, of these sizes."""

    name: str
    sizes: Callable[[Config], tuple[int, int, int]]
    groups: Callable[[Config], int] = lambda config: 1


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The row of one architecture."""

    parts: tuple[Part, ...]
    projections: tuple[str, str, str] | Fused = ("q_proj", "k_proj", "v_proj")
    """What q, k and v are made by, inside the attention."""
    layers: str = "layers"
    """The list of decoder layers, in the backbone."""
    norm: str = "norm"
    """The final norm, in the backbone."""
    scale: str | None = None
    """An attribute of the layer by which every sublayer's output is multiplied."""
    parallel: bool = False
    """All parts read the same thing and are written as one: one site a layer."""
    cache: str = "past_key_values"
    """The name under which a layer is handed the cache."""
    resolve: Callable[[Anatomy, Config], Anatomy] | None = None
    """The row for one configuration, where a setting changes the anatomy; it may refuse."""

    def of(self, config: Config) -> Anatomy:
        """This row, as the configuration makes it."""
        return self if self.resolve is None else self.resolve(self, config)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of its own sites, in order."""
        return tuple(part.kind for part in (self.parts[:1] if self.parallel else self.parts))

    def slots(self, layout: str | None) -> tuple[Slot, ...]:
        """The sublayers of a layer: its own, or a layout that holds its own in their order and inserts others."""
        own = parse_layout(self.kinds())
        if layout is None:
            return own
        slots = parse_layout(layout)
        kept = tuple(slot for slot in slots if slot.kind in KEPT)
        if kept != own:
            raise ValueError(
                f"layout {layout!r}: a converted model keeps its own sublayers, {','.join(self.kinds())}, in this "
                f"order and without options; insert {', '.join(kind for kind in LANES if kind not in KEPT)} around "
                f"them, as in swa:window=16,"
                f"{','.join(self.kinds())}"
            )
        return slots

    def plan(self, config: Config, layout: str | None = None) -> Plan:
        """Every site of a model with this configuration."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slots = self.slots(layout)
        return Plan.regular(
            config.hidden_size, config.num_hidden_layers, slots, vocab=config.vocab_size, kv=(heads, width)
        )


def _gpt2(row: Anatomy, config: Config) -> Anatomy:
    if config.add_cross_attention:
        raise ValueError("gpt2 with add_cross_attention=true is half of an encoder-decoder; only decoders convert")
    return row


def _neox(row: Anatomy, config: Config) -> Anatomy:
    return replace(row, parallel=config.use_parallel_residual)


def _gemma3(row: Anatomy, config: Config) -> Anatomy:
    if config.use_bidirectional_attention:
        raise ValueError("gemma3_text with use_bidirectional_attention=true is an encoder; only decoders convert")
    return row


def _grouped(config: Config) -> tuple[int, int, int]:
    """The sizes of q, k and v where fewer heads make keys and values."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * width, *(config.num_key_value_heads * width,) * 2)


_PRE = Anatomy((Part("attn", "self_attn", norm="input_layernorm"), Part("mlp", "mlp", norm="post_attention_layernorm")))
_SANDWICH = Anatomy(
    (
        Part("attn", "self_attn", norm="input_layernorm", post="post_attention_layernorm"),
        Part("mlp", "mlp", norm="pre_feedforward_layernorm", post="post_feedforward_layernorm"),
    )
)

ANATOMY: Mapping[str, Anatomy] = MappingProxyType(
    {
        "llama": _PRE,
        "qwen2": _PRE,
        "qwen3": _PRE,
        "mistral": _PRE,
        "smollm3": _PRE,
        "qwen3_moe": _PRE,
        "mixtral": _PRE,
        "granite": replace(_PRE, scale="residual_multiplier"),
        "gemma2": _SANDWICH,
        "gemma3_text": replace(_SANDWICH, resolve=_gemma3),
        "olmo2": Anatomy(
            (
                Part("attn", "self_attn", post="post_attention_layernorm"),
                Part("mlp", "mlp", post="post_feedforward_layernorm"),
            )
        ),
        "phi3": Anatomy(
            (
                Part("attn", "self_attn", norm="input_layernorm", post="resid_attn_dropout"),
                Part("mlp", "mlp", norm="post_attention_layernorm", post="resid_mlp_dropout"),
            ),
            Fused("qkv_proj", _grouped),
        ),
        "gpt2": Anatomy(
            (Part("attn", "attn", norm="ln_1"), Part("mlp", "mlp", norm="ln_2")),
            Fused("c_attn", lambda c: (c.hidden_size,) * 3),
            layers="h",
            norm="ln_f",
            resolve=_gpt2,
        ),
        "gpt_neox": Anatomy(
            (
                Part("attn", "attention", norm="input_layernorm", post="post_attention_dropout"),
                Part("mlp", "mlp", norm="post_attention_layernorm", post="post_mlp_dropout"),
            ),
            Fused(
                "query_key_value",
                lambda c: (c.hidden_size // c.num_attention_heads,) * 3,
                lambda c: c.num_attention_heads,
            ),
            norm="final_layer_norm",
            cache="layer_past",
            resolve=_neox,
        ),
    }
)
"""Supported architectures: the only list of them."""

KEPT = frozenset(part.kind for row in ANATOMY.values() for part in row.parts)
"""Sublayer kinds that a decoder has already; the others can be inserted."""


def anatomy_of(config: Config) -> Anatomy:
    """The row of a configuration's architecture; an unknown one is an error that says how to add it."""
    model_type = str(config.model_type).removeprefix(PREFIX)
    if model_type in ANATOMY:
        return ANATOMY[model_type].of(config)
    if model_type == "gemma3":
        raise ValueError("gemma3 is text and vision; convert its text model, of type gemma3_text (Gemma3ForCausalLM)")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{model_type} is an encoder-decoder; only decoders convert: {', '.join(ANATOMY)}")
    raise ValueError(
        f"no anatomy for {model_type!r} (known: {', '.join(ANATOMY)}). If it is a decoder, add a row for it to ANATOMY "
        "in residua/hf/anatomy.py: Part(kind, sublayer, norm=..., post=...) for each sublayer of its decoder layer"
    )


def probe(backbone: Model, anatomy: Anatomy) -> None:
    """Refuse a backbone whose modules are not where its row says: another release, or a fine-tune with other code."""
    name = type(backbone).__name__
    missing = [each for each in (anatomy.layers, anatomy.norm) if not hasattr(backbone, each)]
    if not missing:
        wanted = {each for part in anatomy.parts for each in (part.sublayer, part.norm, part.post) if each}
        wanted |= {anatomy.scale} if anatomy.scale else set()
        for place, layer in enumerate(getattr(backbone, anatomy.layers)):
            missing += [f"{anatomy.layers}.{place}.{each}" for each in sorted(wanted) if not hasattr(layer, each)]
    if missing:
        raise ValueError(
            f"{name} is not built as its row in residua/hf/anatomy.py says: it has no {', '.join(missing[:3])}; "
            "correct the row, or use a transformers release that it was written for"
        )
