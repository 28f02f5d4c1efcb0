"""One training run, in one frozen dataclass of plain values that goes into JSON and back.

A config that exists can be built: the fields, the layout, the design and their combination are checked when it is
made, with one error that names the field and the cure. The command line makes its flags from these fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from residua.model.config import ModelConfig
from residua.spec import parse, render


class Field(NamedTuple):
    """One field of `TrainConfig`: what a flag and a check need to know."""

    name: str
    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    """The words a `Literal` allows; empty for the other kinds."""
    optional: bool
    default: Any
    help: str

    def describe(self) -> str:
        """What a user may write."""
        if self.choices:
            return "|".join(self.choices)
        return {bool: "true|false", int: "whole number", float: "number", str: "text"}[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Model, data and recipe. Two runs of one config are the same run."""

    design: Annotated[str, "Residual design, such as delta:blocks=4."] = "standard"
    layout: Annotated[str, "Sublayers of a block."] = "attn,mlp"
    width: Annotated[int, "Width of the stream."] = 128
    depth: Annotated[int, "Transformer blocks."] = 6
    heads: Annotated[int, "Attention heads."] = 4
    kv_heads: Annotated[int | None, "Key and value heads; as many as heads by default."] = None
    mlp_width: Annotated[int | None, "Hidden width of the MLP; 8/3 of the width by default."] = None
    qk_norm: Annotated[bool, "RMS-normalise queries and keys."] = False
    rope_base: Annotated[float, "Base of the rotary positions."] = 10_000.0
    lane_norms: Annotated[Literal["shared", "separate"], "One pre-norm gain for q, k and v, or one each."] = "shared"
    tied: Annotated[bool, "The head's matrix is the embedding."] = True
    eps: Annotated[float, "Of every norm."] = 1e-9
    init_std: Annotated[float | None, "Of every matrix at the start; 0.5 / sqrt(width) by default."] = None

    corpus: Annotated[str, "pydoc, pycode, dir:PATH, file:GLOB or hf:NAME."] = "pydoc"
    tokenizer: Annotated[str, "bytes, bpe:VOCAB or hf:DIR."] = "bytes"
    objective: Annotated[Literal["clm", "mlm"], "Next token (decoder) or hidden tokens (encoder)."] = "clm"

    steps: Annotated[int, "Updates."] = 500
    batch: Annotated[int, "Sequences per forward pass."] = 8
    context: Annotated[int, "Tokens per sequence."] = 256
    accumulate: Annotated[int, "Forward passes per update."] = 1
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for the sublayers' matrices, AdamW for the rest."] = (
        "adamw"
    )
    lr: Annotated[float, "Learning rate."] = 2e-3
    residual_lr: Annotated[float | None, "Learning rate of the design's own parameters; lr by default."] = None
    schedule: Annotated[Literal["cosine", "wsd"], "Cosine, or warm-up, stable, decay."] = "cosine"
    warmup_share: Annotated[float, "Share of the steps in which the rate rises."] = 0.05
    decay_share: Annotated[float | None, "wsd: share of the steps in which the rate falls; 0.2 by default."] = None
    min_lr_share: Annotated[float, "Share of the rate that is left at the end."] = 0.1
    weight_decay: Annotated[float, "Of matrices; norms, embeddings and the design's own have none."] = 0.1
    beta1: Annotated[float, "AdamW."] = 0.9
    beta2: Annotated[float, "AdamW."] = 0.95
    clip: Annotated[float, "Largest gradient norm that is applied; 0 turns clipping off."] = 1.0
    explode: Annotated[float, "Gradient norm that stops the run."] = 1e5

    dtype: Annotated[Literal["float32", "bfloat16"], "bfloat16: autocast; parameters stay float32."] = "float32"
    fp32_stream: Annotated[bool, "bfloat16: keep the stream, and the design's own arithmetic, in float32."] = False
    checkpointed: Annotated[bool, "Recompute each block in the backward pass instead of keeping its activations."] = (
        False
    )
    compile: Annotated[bool, "torch.compile the training step's forward."] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: cuda where there is one."] = "auto"
    threads: Annotated[int | None, "Processor threads; torch's own choice by default."] = None
    seed: Annotated[int, "Of the weights, the order of the batches and everything drawn."] = 0

    log_every: Annotated[int, "Steps between training lines in metrics.jsonl."] = 1
    eval_every: Annotated[int, "Steps between validations; the first and the last are always made."] = 100
    eval_windows: Annotated[int, "Validation sequences, evenly spaced and always the same; 0 takes all."] = 64
    stream_rms: Annotated[bool, "Validation lines hold the RMS of what every site reads."] = False
    save_every: Annotated[int, "Steps between checkpoints; the last is always made."] = 100
    keep: Annotated[int, "Checkpoints kept: the newest, and what to fall back to."] = 2

    def __post_init__(self) -> None:
        for known in config_fields().values():
            object.__setattr__(self, known.name, _checked(known, getattr(self, known.name)))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("lr", "residual_lr", "explode", "rope_base"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number, not {value}")
        for name in ("warmup_share", "decay_share", "min_lr_share", "beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be from 0 to below 1, not {value}")
        if self.schedule != "wsd" and self.decay_share is not None:
            raise ValueError(f"decay_share belongs to schedule=wsd; {self.schedule} has none. Drop it")
        if self.schedule == "wsd" and self.warmup_share + self.decline > 1:
            raise ValueError(
                f"warmup_share {self.warmup_share} and decay_share {self.decline} are more than the whole run"
            )
        if self.fp32_stream and self.dtype == "float32":
            raise ValueError("fp32_stream says something only with dtype=bfloat16; with float32 the stream is. Drop it")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, not {self.seed}")
        # one spelling for one design, so that defaults written out do not make another run of it
        object.__setattr__(self, "design", _built(self.model(vocab=2)))

    @property
    def residual_rate(self) -> float:
        """Learning rate of the design's own parameters."""
        return self.lr if self.residual_lr is None else self.residual_lr

    @property
    def decline(self) -> float:
        """Share of the steps in which a WSD rate falls."""
        return 0.2 if self.decay_share is None else self.decay_share

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update sees."""
        return self.batch * self.accumulate * self.context

    @property
    def digest(self) -> str:
        """A short name of everything here: equal configs have equal digests."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def model(self, vocab: int) -> ModelConfig:
        """The model's part, for a vocabulary."""
        shared = {field.name for field in fields(ModelConfig)} & set(config_fields())
        return ModelConfig(
            vocab=vocab, causal=self.objective == "clm", **{name: getattr(self, name) for name in shared}
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in config_fields()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse; an unknown field is an error that names it."""
        unknown = set(values) - set(config_fields())
        if unknown:
            raise ValueError(f"unknown training fields: {', '.join(sorted(unknown))}")
        return cls(**values)


_LEAST: Mapping[str, float] = {
    "steps": 1, "batch": 1, "context": 2, "accumulate": 1, "log_every": 1, "eval_every": 1, "eval_windows": 0,
    "save_every": 1, "keep": 2, "threads": 1, "seed": 0, "weight_decay": 0, "clip": 0,
}  # fmt: skip


@lru_cache(maxsize=256)
def _built(model: ModelConfig) -> str:
    """The shortest spelling of a design, from its model built without memory: a wrong design, layout or combination
    of them says so here."""
    import torch

    from residua.model import Transformer

    with torch.device("meta"):
        return Transformer(model).stream.spec


@cache
def config_fields() -> dict[str, Field]:
    """Every field by name, with its kind, choices, default and help."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    return {field.name: _field(field.name, hints[field.name], field.default) for field in fields(TrainConfig)}


def _field(name: str, annotated: Any, default: Any) -> Field:
    hint, text = get_args(annotated)
    optional = NoneType in get_args(hint)
    if optional:
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return Field(name, str, get_args(hint), optional, default, text)
    return Field(name, hint, (), optional, default, text)


def _checked(known: Field, value: Any) -> Any:
    """The value, if its kind is right: a whole number may stand for a number, nothing else for anything."""
    if known.name == "design" and isinstance(value, Mapping):
        return render(*parse(value))
    if value is None and known.optional:
        return None
    if known.kind is float and type(value) is int:
        return float(value)
    if type(value) is not known.kind or (known.choices and value not in known.choices):
        raise ValueError(f"{known.name} takes {known.describe()}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{known.name} must be finite, not {value}")
    return value
