"""What a decoder layer is made of: found by running it (`find.py`) or a row of this table, and no copied forward.

A layer is sites in order, each `state <- write(state, f(norm(read(state))))`, and `f` is a line of `program.py`:

    Part("attn", "self_attn", norm="input_layernorm")       a norm before the sublayer; `post` is applied after it

Rows are kept for what cannot be found, and as what the finder must find: to add one, read the `forward` of the decoder
layer, write its row into `ANATOMY` under its `model_type`, and add a tiny configuration of it to `tests/hf/models.py`:
the contract tests then run over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from residua.plan import LANES, Plan, Site, Slot, parse_layout

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
    """One site of a decoder layer, by the names of its modules."""

    kind: str
    """`attn` for what mixes tokens, `mlp` for what does not."""
    sublayer: str
    """The module that does the work; of attention, the one with the projections."""
    norm: str | None = None
    """Applied to what is read; None where the sublayer takes the stream as it is."""
    post: str | None = None
    """Applied to what the sublayer made: a norm or a dropout."""
    text: str | None = None
    """What is written, as a line of `program.py`, where it is more than post(sublayer(x))."""

    @property
    def line(self) -> str:
        """What is written."""
        if self.text is not None:
            return self.text
        made = f"{self.sublayer}(lanes, **kwargs)" if self.kind == "attn" else f"{self.sublayer}(x)"
        return f"{self.post}({made})" if self.post else made


@dataclass(frozen=True, slots=True)
class Fused:
    """One projection that makes q, k and v: `groups` times (q, k, v) side by side, of these sizes."""

    name: str
    sizes: tuple[int, int, int] | Callable[[Config], tuple[int, int, int]]
    groups: int | Callable[[Config], int] = 1

    def of(self, config: Config) -> Fused:
        """It, with the numbers of one configuration."""
        return Fused(self.name, *self.layout(config))

    def layout(self, config: Config) -> tuple[tuple[int, int, int], int]:
        """The sizes and how many groups of them, for one configuration."""
        sizes = self.sizes(config) if callable(self.sizes) else self.sizes
        return sizes, self.groups(config) if callable(self.groups) else self.groups


Projections = tuple[str, str, str] | Fused


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of decoder layer."""

    parts: tuple[Part, ...]
    projections: Projections | None = ("q_proj", "k_proj", "v_proj")
    """What q, k and v are made by, inside the attention; None where they cannot have inputs of their own."""
    beside: tuple[str, ...] = ()
    """Other modules inside the attention that see its input, such as a gate; they go with q."""
    returns: tuple[str, ...] | None = None
    """What a layer that returns a tuple returns behind the state, as lines."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its sites, in order."""
        return tuple(part.kind for part in self.parts)

    @property
    def attention(self) -> Part | None:
        """The part whose q, k and v can have inputs of their own."""
        return next((part for part in self.parts if part.kind == "attn"), None) if self.projections else None

    def lanes(self, place: int) -> int:
        """How many inputs the site at a place can tell apart."""
        return LANES["attn"] if self.attention is self.parts[place] else 1


@dataclass(frozen=True, slots=True)
class Anatomy:
    """How one architecture is built."""

    blocks: tuple[Block, ...]
    """The kinds of layers."""
    order: tuple[int, ...] = ()
    """Which of them each layer is; empty where there is one kind."""
    layers: str = "layers"
    """The list of decoder layers, in the backbone."""
    norm: str = "norm"
    """The final norm, in the backbone."""
    cache: str = "past_key_values"
    """The name under which a layer is handed the cache."""
    exact: bool = True
    """Whether x + f(x) is the layer to the last bit; False where the layer adds in another order."""
    depth: int | None = None
    """How many layers there are, where the num_hidden_layers of the configuration counts something else."""
    resolve: Callable[[Anatomy, Config], Anatomy] | None = None
    """The row for one configuration, where a setting changes the anatomy; it may refuse."""

    def of(self, config: Config) -> Anatomy:
        """This row, as the configuration makes it."""
        made = self if self.resolve is None else self.resolve(self, config)
        blocks = tuple(
            replace(block, projections=block.projections.of(config)) if isinstance(block.projections, Fused) else block
            for block in made.blocks
        )
        return replace(made, blocks=blocks, resolve=None)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sites of the first kind of layer."""
        return self.blocks[0].parts

    @property
    def projections(self) -> Projections | None:
        """What q, k and v are made by, in the first kind of layer that has them."""
        return next((block.projections for block in self.blocks if block.projections), None)

    def block(self, layer: int) -> Block:
        """The kind of one layer."""
        return self.blocks[self.order[layer] if self.order else 0]

    def slots(self, layout: str | None, layer: int = 0) -> tuple[Slot, ...]:
        """The sublayers of a layer: its own, or a layout that holds its own in their order and inserts others."""
        kinds = self.block(layer).kinds
        own = parse_layout(kinds)
        if layout is None:
            return own
        slots = parse_layout(layout)
        kept = tuple(slot for slot in slots if slot.kind in KEPT)
        if kept != own or len({block.kinds for block in self.blocks}) > 1:
            every = " and ".join(dict.fromkeys(",".join(block.kinds) for block in self.blocks))
            raise ValueError(
                f"layout {layout!r}: a converted model keeps its own sublayers, {every}, in this "
                f"order and without options; insert {', '.join(kind for kind in LANES if kind not in KEPT)} around "
                f"them, as in swa:window=16,{','.join(kinds)}"
            )
        return slots

    def plan(self, config: Config, layout: str | None = None) -> Plan:
        """Every site of a model with this configuration."""
        heads = _size(config, "num_attention_heads") or 1
        kv = _size(config, "num_key_value_heads") or heads, _size(config, "head_dim") or config.hidden_size // heads
        sites: list[Site] = []
        depth = self.depth or config.num_hidden_layers
        for layer in range(depth):
            slots, places = self.slots(layout, layer), iter(range(len(self.block(layer).parts)))
            kinds = [slot.kind for slot in slots]
            lanes = [self.block(layer).lanes(next(places)) if kind in KEPT else LANES[kind] for kind in kinds]
            before = len(sites)
            sites += (
                Site(before + place, layer, kind, place == 0, place == len(kinds) - 1, lanes[place],
                     kinds[:place].count(kind))
                for place, kind in enumerate(kinds)
            )  # fmt: skip
        head = Site(len(sites), depth, "head", first=True, last=True)
        return Plan(config.hidden_size, tuple(sites), head, config.vocab_size, kv)


def _size(config: Config, name: str) -> int | None:
    """A number of a configuration; None where it has none, or another for every layer."""
    try:
        found = getattr(config, name, None)
    except RuntimeError:  # transformers' own error for what varies between layers
        return None
    return found if isinstance(found, int) else None


def _gpt2(row: Anatomy, config: Config) -> Anatomy:
    if config.add_cross_attention:
        raise ValueError("gpt2 with add_cross_attention=true is half of an encoder-decoder; only decoders convert")
    return row


def _neox(row: Anatomy, config: Config) -> Anatomy:
    attention = "post_attention_dropout(attention(lanes, **kwargs))"
    both = f"post_mlp_dropout(mlp(post_attention_layernorm(raw))) + {attention}"
    part = Part("attn", "attention", norm="input_layernorm", text=both)
    return replace(row, blocks=(replace(row.blocks[0], parts=(part,)),)) if config.use_parallel_residual else row


def _gemma3(row: Anatomy, config: Config) -> Anatomy:
    if config.use_bidirectional_attention:
        raise ValueError("gemma3_text with use_bidirectional_attention=true is an encoder; only decoders convert")
    return row


def _grouped(config: Config) -> tuple[int, int, int]:
    """The sizes of q, k and v where fewer heads make keys and values."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * width, *(config.num_key_value_heads * width,) * 2)


def _row(*parts: Part, projections: Projections = ("q_proj", "k_proj", "v_proj"), **more: Any) -> Anatomy:
    return Anatomy((Block(parts, projections),), **more)


_PRE = _row(Part("attn", "self_attn", norm="input_layernorm"), Part("mlp", "mlp", norm="post_attention_layernorm"))
_SANDWICH = _row(
    Part("attn", "self_attn", norm="input_layernorm", post="post_attention_layernorm"),
    Part("mlp", "mlp", norm="pre_feedforward_layernorm", post="post_feedforward_layernorm"),
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
        "granite": _row(
            Part("attn", "self_attn", "input_layernorm", text="self_attn(lanes, **kwargs) * self.residual_multiplier"),
            Part("mlp", "mlp", "post_attention_layernorm", text="mlp(x) * self.residual_multiplier"),
        ),
        "gemma2": _SANDWICH,
        "gemma3_text": replace(_SANDWICH, resolve=_gemma3),
        "olmo2": _row(
            Part("attn", "self_attn", post="post_attention_layernorm"),
            Part("mlp", "mlp", post="post_feedforward_layernorm"),
        ),
        "phi3": _row(
            Part("attn", "self_attn", norm="input_layernorm", post="resid_attn_dropout"),
            Part("mlp", "mlp", norm="post_attention_layernorm", post="resid_mlp_dropout"),
            projections=Fused("qkv_proj", _grouped),
        ),
        "gpt2": _row(
            Part("attn", "attn", norm="ln_1"),
            Part("mlp", "mlp", norm="ln_2"),
            projections=Fused("c_attn", lambda c: (c.hidden_size,) * 3),
            layers="h",
            norm="ln_f",
            resolve=_gpt2,
        ),
        "gpt_neox": _row(
            Part("attn", "attention", norm="input_layernorm", post="post_attention_dropout"),
            Part("mlp", "mlp", norm="post_attention_layernorm", post="post_mlp_dropout"),
            projections=Fused(
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
"""Architectures whose anatomy is written down."""

KEPT = frozenset({"attn", "mlp"})
"""Sublayer kinds that a decoder has already; the others can be inserted."""


def anatomy_of(config: Config) -> Anatomy | None:
    """The anatomy of a configuration: what a conversion stored in it, else its row, else None: it is to be found."""
    refuse_type(config)
    stored = getattr(config, "anatomy", None)
    if stored is not None:
        return from_json(stored)
    row = ANATOMY.get(str(config.model_type).removeprefix(PREFIX))
    return None if row is None else row.of(config)


def known(config: Config) -> Anatomy:
    """The anatomy of a converted model, which its config has or its row."""
    anatomy = anatomy_of(config)
    if anatomy is None:
        raise ValueError(
            f"the config of this {config.model_type} has no anatomy: put back the one that was saved with it"
        )
    return anatomy


def refuse_type(config: Config) -> None:
    """Refuse what is no decoder of text by its configuration alone."""
    model_type = str(config.model_type).removeprefix(PREFIX)
    if model_type == "gemma3":
        raise ValueError("gemma3 is text and vision; convert its text model, of type gemma3_text (Gemma3ForCausalLM)")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{model_type} is an encoder-decoder; only decoders convert")


def to_json(anatomy: Anatomy) -> dict[str, Any]:
    """An anatomy as a config keeps it."""
    return {
        "layers": anatomy.layers,
        "norm": anatomy.norm,
        "cache": anatomy.cache,
        "exact": anatomy.exact,
        **({} if anatomy.depth is None else {"depth": anatomy.depth}),
        "order": list(anatomy.order),
        "blocks": [
            {
                "parts": [
                    {key: each for key, each in asdict(part).items() if each is not None} for part in block.parts
                ],
                "projections": _made_by(block.projections),
                "beside": list(block.beside),
                "returns": _listed(block.returns),
            }
            for block in anatomy.blocks
        ],
    }


def _made_by(made: Projections | None) -> Any:
    if not isinstance(made, Fused):
        return _listed(made)
    sizes, groups = made.layout(None)  # of one configuration already
    return {"name": made.name, "sizes": list(sizes), "groups": groups}


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def from_json(stored: Mapping[str, Any]) -> Anatomy:
    """The anatomy that a config keeps."""

    def block(kept: Mapping[str, Any]) -> Block:
        made = kept["projections"]
        if isinstance(made, Mapping):
            made = Fused(made["name"], tuple(made["sizes"]), made["groups"])
        return Block(
            tuple(Part(**part) for part in kept["parts"]),
            tuple(made) if isinstance(made, list) else made,
            tuple(kept["beside"]),
            None if kept["returns"] is None else tuple(kept["returns"]),
        )

    try:
        blocks = tuple(map(block, stored["blocks"]))
        names = stored["layers"], stored["norm"], stored["cache"]
        return Anatomy(blocks, tuple(stored["order"]), *names, bool(stored["exact"]), stored.get("depth"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the anatomy in this config cannot be read ({error}); convert the base again") from None


def probe(backbone: Model, anatomy: Anatomy) -> None:
    """Refuse a backbone whose modules are not where its anatomy says: another release, or other code."""
    name = type(backbone).__name__
    missing = [each for each in (anatomy.layers, anatomy.norm) if not has(backbone, each)]
    if not missing:
        for place, layer in enumerate(backbone.get_submodule(anatomy.layers)):
            parts = anatomy.block(place).parts
            wanted = {each for part in parts for each in (part.sublayer, part.norm, part.post) if each}
            missing += [f"{anatomy.layers}.{place}.{each}" for each in sorted(wanted) if not has(layer, each)]
    if missing:
        raise ValueError(
            f"{name} is not built as its anatomy says: it has no {', '.join(missing[:3])}; correct its row in "
            "residua/hf/anatomy.py, or use a transformers release that it was written for"
        )
    there, planned = len(backbone.get_submodule(anatomy.layers)), anatomy.depth or backbone.config.num_hidden_layers
    if there != planned:
        raise ValueError(f"{name} has {there} layers, and the plan of its stream {planned}; convert the base again")


def has(module: Model, path: str) -> bool:
    """Whether there is a module at a path."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
