"""What is compared: one checkpoint that goes on as it is, and its conversions, on equal tokens.

    designs = ["delta:blocks=4", "mudd"]
    seeds = [0, 1, 2]
    checkpoint = "DIR"                    # what is converted; or [base] and [pretrain], which make one first

    [base]                                # a Llama of transformers, from random weights
    depth = 8
    width = 64

    [pretrain]                            # fields of FinetuneConfig: how it is trained before anything is converted
    corpus = "pysite"
    steps = 9000

    [finetune]                            # fields of FinetuneConfig, for every row
    corpus = "pysite"
    steps = 500

    [tune]                                # each row gets its own best of these, on seeds of their own
    lr = [3e-4, 1e-3, 3e-3]
    residual_lr = [1e-3, 5e-3, 2e-2]
    base_lr = [3e-4, 6e-4, 1e-3, 2e-3, 3e-3]

Rates are tuned one after the other: lr at the middle residual_lr, then residual_lr at the best lr, which is
len(lr) + len(residual_lr) - 1 runs a conversion. What goes on unconverted has one rate; base_lr gives it as many runs.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from residua.lab.common.files import Record, Values, json_digest
from residua.lab.compare.plan import slug_of
from residua.lab.finetune_config import MODEL, FinetuneConfig
from residua.registry import design
from residua.spec import parse

BASE = "base"
"""The row that goes on without a conversion, and the folder of the pretraining."""
START = "start"
"""The folder of the random weights that pretraining begins with."""
OWN = ("checkpoint", "design", "layout", "seed", "threads")
"""Fields of a run that the plan sets itself."""
Rates = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A Llama of transformers with tied embeddings."""

    depth: int = 8
    width: int = 64
    heads: int = 4
    seed: int = 2000
    """Of its weights and its batches: none of the seeds that are compared, so that no row sees its batches again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The rates that every row chooses from, and the seeds it chooses on."""

    lr: tuple[float, ...] = ()
    residual_lr: tuple[float, ...] = ()
    base_lr: tuple[float, ...] = ()
    """Of the row that goes on as it is; empty: those of lr."""
    seeds: tuple[int, ...] = (1000,)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a plan."""

    label: str
    """A design, or `base`."""
    config: FinetuneConfig
    folder: str
    """Below the output directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Everything that decides the outcome."""

    designs: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    checkpoint: str | None = None
    base: Base | None = None
    pretrain: Record = field(default_factory=dict)
    finetune: Record = field(default_factory=dict)
    tune: Grid = field(default_factory=Grid)
    threads: int = 1

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.base is None):
            raise ValueError("a plan has a checkpoint to convert, or a [base] to pretrain: one of the two")
        if self.pretrain and self.base is None:
            raise ValueError("[pretrain] says how a [base] is trained, and this plan has none")
        for key, values in (("designs", self.designs), ("seeds", self.seeds), ("tune.seeds", self.tune.seeds)):
            if not values:
                raise ValueError(f"a plan needs at least one of {key}")
            if len(set(values)) < len(values):
                raise ValueError(f"{key} names one twice: {', '.join(map(str, values))}")
        for seed in (*self.seeds, *self.tune.seeds):
            if type(seed) is not int or not 0 <= seed < 2**63:
                raise ValueError(f"seeds are whole numbers from 0 on, not {seed!r}")
        used = set(self.tune.seeds if self.tune.lr else ()) | ({self.base.seed} if self.base else set())
        if both := used & set(self.seeds):
            raise ValueError(f"seed {min(both)} is used before the comparison; report other seeds")
        for key in ("lr", "residual_lr", "base_lr"):
            rates = getattr(self.tune, key)
            if any(isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf
                   for rate in rates) or len({f"{rate:g}" for rate in rates}) < len(rates):  # fmt: skip
                raise ValueError(f"tune.{key} are positive numbers, each another, not {list(rates)}")
        if (self.tune.residual_lr or self.tune.base_lr) and not self.tune.lr:
            raise ValueError("tune.residual_lr and tune.base_lr need tune.lr: rates are tuned together")
        for spec in self.designs:
            design(parse(spec)[0])
        for key in ("pretrain", "finetune"):
            if own := sorted(set(getattr(self, key)) & set(OWN)):
                raise ValueError(f"[{key}] holds {', '.join(own)}, which the plan sets itself")
        if self.base is not None:
            self.pretraining(Path())
        for label in self.labels():  # a wrong field says so before anything is trained
            self.config(Path(), label, self.seeds[0])

    def labels(self) -> list[str]:
        """Every row: the checkpoint itself, then its conversions."""
        return [BASE, *self.designs]

    def source(self, out: Path) -> Path:
        """Where the checkpoint is that all rows begin with."""
        return out / BASE / MODEL if self.checkpoint is None else Path(self.checkpoint)

    def pretraining(self, out: Path) -> Run:
        """The run that makes the checkpoint."""
        assert self.base is not None
        settings = {"tokenizer": "bytes", "weight_decay": 0.1, "residual_lr": None, **self.pretrain}
        return Run(BASE, FinetuneConfig.from_json(
            settings | {"checkpoint": str(out / START), "seed": self.base.seed, "threads": self.threads}
        ), BASE)  # fmt: skip

    def config(self, out: Path, label: str, seed: int, rates: Rates | None = None) -> FinetuneConfig:
        """The run of a row and seed."""
        # what is pretrained here is no name of the hub, though it is not there yet
        own = {} if self.base is None else {"tokenizer": self.pretrain.get("tokenizer", "bytes")}
        settings: Values = {**own, **self.finetune, "threads": self.threads, **(rates or {})}
        return FinetuneConfig.from_json(
            settings | {"checkpoint": str(self.source(out)), "seed": seed, "design": None if label == BASE else label}
        )

    def trials(self, label: str, lr: float | None = None) -> list[Rates]:
        """The rates that a row tries first; with the best lr of those, the rates that it tries then."""
        if label == BASE:
            return [{"lr": each} for each in self.tune.base_lr or self.tune.lr] if lr is None else []
        if not self.tune.residual_lr:
            return [{"lr": each} for each in self.tune.lr] if lr is None else []
        middle = self.tune.residual_lr[len(self.tune.residual_lr) // 2]
        if lr is None:
            return [{"lr": each, "residual_lr": middle} for each in self.tune.lr]
        return [{"lr": lr, "residual_lr": each} for each in self.tune.residual_lr if each != middle]

    def tuning(self, out: Path, label: str, lr: float | None = None) -> list[Run]:
        """The runs of `trials`."""
        made = []
        for rates in self.trials(label, lr):
            name = "-".join(f"{key}{value:g}" for key, value in rates.items())
            made += [
                Run(label, self.config(out, label, seed, rates), f"tune/{slug_of(label)}/{name}-seed{seed}")
                for seed in self.tune.seeds
            ]
        return made

    def runs(self, out: Path, chosen: Mapping[str, Rates]) -> list[Run]:
        """The runs of the table, with the rates chosen for each row; seed by seed, so that rows grow together."""
        return [
            Run(label, self.config(out, label, seed, chosen.get(label)), f"runs/{slug_of(label)}/seed{seed}")
            for seed in self.seeds
            for label in self.labels()
        ]

    def trial_count(self, label: str) -> int:
        """Runs that tune a row."""
        later = self.trials(label, 1.0) if self.tune.lr else []
        return len(self.tune.seeds) * (len(self.trials(label)) + len(later))

    def to_json(self) -> Values:
        """Plain values."""
        values = json.loads(json.dumps(asdict(self)))
        return {key: value for key, value in values.items() if value not in (None, {})}

    @classmethod
    def from_json(cls, values: Record) -> ConversionPlan:
        """From TOML or JSON values; a wrong key is an error that names it."""
        settings: Values = _known(cls, "a plan", values)
        for key, made in (("base", Base), ("tune", Grid)):
            if key in settings:
                settings[key] = made(**_known(made, f"[{key}]", settings[key]))
        for key in ("pretrain", "finetune"):
            if not isinstance(settings.get(key, {}), Mapping):
                raise ValueError(f"[{key}] is a table of training fields, not {settings[key]!r}")
        if "designs" not in settings:
            raise ValueError('a plan needs designs, such as designs = ["delta:blocks=4", "mudd"]')
        return cls(**settings)

    @property
    def digest(self) -> str:
        """A short name of everything here."""
        return json_digest(self.to_json())[:16]


def is_conversion(path: Path) -> bool:
    """Whether a TOML file holds a plan of this kind: one of designs from scratch has no [finetune]."""
    try:
        return "finetune" in tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return False  # whoever reads it as another kind of plan says what is wrong with it


def read_conversion(path: Path) -> ConversionPlan:
    """The plan in a TOML file."""
    try:
        return ConversionPlan.from_json(tomllib.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _known(cls: type, name: str, values: object) -> Values:
    """The fields of a table: lists as tuples, an unknown one an error."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is a table, not {values!r}")
    known = [each.name for each in fields(cls)]
    for key in values:
        if key not in known:
            raise ValueError(f"{name} has no {key!r}; it has {', '.join(known)}")
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
