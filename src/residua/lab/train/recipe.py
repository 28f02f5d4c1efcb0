"""How a model is trained, whatever it is: data, batches, optimizer, schedule, precision, checkpoints.

A frozen dataclass of plain values. `TrainConfig` adds a model of our own to it, `FinetuneConfig` a checkpoint. The
fields are checked when it is made, with one error that names the field and the cure, and the command lines make their
flags from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

from residua.lab.common.files import Record, Values, json_digest
from residua.spec import parse, render

Plain = bool | int | float | str | None


class Field(NamedTuple):
    """One field of a recipe: what a flag and a check need to know."""

    name: str
    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    """The words a `Literal` allows; empty for the other kinds."""
    optional: bool
    default: Plain
    help: str

    def describe(self) -> str:
        """What a user may write."""
        if self.choices:
            return "|".join(self.choices)
        return {bool: "true|false", int: "whole number", float: "number", str: "text"}[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Data and updates. Two runs of one recipe on one model are the same run."""

    corpus: Annotated[str, "pydoc, pycode, pysite, dir:PATH, file:GLOB or hf:NAME."] = "pydoc"
    tokenizer: Annotated[str, "bytes, bpe:VOCAB or hf:DIR."] = "bytes"

    steps: Annotated[int, "Training steps."] = 500
    batch: Annotated[int, "Sequences per forward pass."] = 8
    context: Annotated[int, "Tokens per sequence."] = 256
    accumulate: Annotated[int, "Gradient accumulation: forward passes per step."] = 1
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for the sublayers' matrices, AdamW for the rest."] = (
        "adamw"
    )
    lr: Annotated[float, "Learning rate."] = 2e-3
    residual_lr: Annotated[float | None, "Learning rate of the parameters that the design adds; lr by default."] = None
    schedule: Annotated[Literal["cosine", "wsd"], "Learning-rate schedule: cosine, or warm-up, stable, decay."] = (
        "cosine"
    )
    warmup_share: Annotated[float, "Warm-up, as a fraction of the steps."] = 0.05
    decay_share: Annotated[float | None, "wsd: decay, as a fraction of the steps; 0.2 by default."] = None
    min_lr_share: Annotated[float, "Final learning rate, as a fraction of the peak."] = 0.1
    weight_decay: Annotated[
        float, "Weight decay of matrices; none for norms, embeddings and the design's parameters."
    ] = 0.1
    beta1: Annotated[float, "AdamW beta1."] = 0.9
    beta2: Annotated[float, "AdamW beta2."] = 0.95
    clip: Annotated[float, "Gradient clipping norm; 0: off."] = 1.0
    explode: Annotated[float, "Gradient norm above which the run stops as diverged."] = 1e5

    dtype: Annotated[Literal["float32", "bfloat16"], "bfloat16: autocast; parameters stay float32."] = "float32"
    checkpointed: Annotated[bool, "Gradient checkpointing: recompute each block in the backward pass."] = False
    compile: Annotated[bool, "Use torch.compile for the forward pass."] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: cuda if available."] = "auto"
    threads: Annotated[int | None, "CPU threads; PyTorch's default if not set."] = None
    seed: Annotated[int, "Random seed of weights and batches."] = 0

    log_every: Annotated[int, "Steps between training records in metrics.jsonl."] = 1
    eval_every: Annotated[int, "Steps between validations; the first and the last step always validate."] = 100
    eval_windows: Annotated[int, "Validation sequences, evenly spaced and fixed; 0: all."] = 64
    save_every: Annotated[int, "Steps between checkpoints; the last step always saves."] = 100
    keep: Annotated[int, "Number of recent checkpoints to keep."] = 2

    @property
    def masked(self) -> bool:
        """Whether hidden tokens are asked for, and not the next one."""
        return False

    def __post_init__(self) -> None:
        for known in fields_of(type(self)).values():
            object.__setattr__(self, known.name, _checked(known, getattr(self, known.name)))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most:,}, not {value:,}")
        for name in ("lr", "residual_lr", "explode"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number, not {value}")
        for name in ("warmup_share", "decay_share", "min_lr_share", "beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be from 0 to below 1, not {value}")
        if self.schedule != "wsd" and self.decay_share is not None:
            raise ValueError(f"decay_share has no effect with schedule={self.schedule}; drop it or use schedule=wsd")
        if self.schedule == "wsd" and self.warmup_share + self.decline > 1:
            raise ValueError(f"warmup_share {self.warmup_share} and decay_share {self.decline} add up to more than 1")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, not {self.seed}")

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
        return digest_of(self.to_json())

    def to_json(self) -> Values:
        """Plain values."""
        return {name: getattr(self, name) for name in fields_of(type(self))}

    @classmethod
    def from_json(cls, values: Record) -> Self:
        """The inverse; an unknown field is an error that names it."""
        unknown = set(values) - set(fields_of(cls))
        if unknown:
            raise ValueError(f"unknown training fields: {', '.join(sorted(map(str, unknown)))}")
        return cls(**values)


LATER: Record = {}
"""Fields that came after runs were first kept as records, with their defaults: at these they are no part of the digest,
so that a record of before is still that of the same run."""


def digest_of(settings: Record) -> str:
    """The digest of a config, from its plain values."""
    return json_digest({key: value for key, value in settings.items() if key not in LATER or value != LATER[key]})[:16]


_LEAST: Mapping[str, float] = {
    "steps": 1, "batch": 1, "context": 2, "accumulate": 1, "log_every": 1, "eval_every": 1, "eval_windows": 0,
    "save_every": 1, "keep": 2, "threads": 1, "seed": 0, "weight_decay": 0, "clip": 0,
}  # fmt: skip


_MOST: Mapping[str, int] = {
    "steps": 10**9, "batch": 1 << 20, "context": 1 << 24, "accumulate": 1 << 20, "threads": 1024, "keep": 10**6,
}  # fmt: skip
"""Beyond these a number is a slip of the hand: no machine has so many threads, and torch ends the process for it."""


_known: dict[type[Recipe], dict[str, Field]] = {}


def fields_of(cls: type[Recipe]) -> dict[str, Field]:
    """Every field of a recipe class by name, with its kind, choices, default and help; those of the model first."""
    if cls in _known:
        return _known[cls]
    hints = get_type_hints(cls, include_extras=True)
    shared = {field.name for field in fields(Recipe)}
    ordered = sorted(fields(cls), key=lambda field: field.name in shared)
    _known[cls] = {field.name: _field(field.name, hints[field.name], field.default) for field in ordered}
    return _known[cls]


def _field(name: str, annotated: object, default: Any) -> Field:
    hint, text = get_args(annotated)
    optional = NoneType in get_args(hint)
    if optional:
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return Field(name, str, get_args(hint), optional, default, text)
    return Field(name, hint, (), optional, default, text)


def _checked(known: Field, value: object) -> object:
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
