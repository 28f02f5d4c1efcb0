"""What is compared: designs x layouts x sizes x seeds, one recipe for all, and how rates are tuned.

A plan comes from flags or from a TOML file, and goes into the output directory as JSON; a directory belongs to one
plan. Everything wrong with a plan is found before anything is written.

    designs = ["standard", "delta:blocks=4"]
    seeds = [0, 1, 2]
    match = "params"                      # none | params | flops: narrow the MLP so that all cost the same
    also = [{ design = "standard", layout = "swa:window=4,attn,mlp" }]   # rows besides designs x layouts

    [train]                               # any field of TrainConfig but design, layout, size, seed and threads
    corpus = "pycode"
    steps = 1000

    [tune]                                # every variant gets its own best of these, on seeds of their own
    lr = [1e-3, 2e-3, 4e-3]
    seeds = [100]

    [chosen]                              # or: the learning rate of every row by its label, chosen beforehand
    "standard | attn,mlp" = 4e-3
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from residua.lab.common.files import Record, Values, json_digest
from residua.lab.compare.match import matched_mlp_width
from residua.lab.train import TrainConfig
from residua.lab.train.config import config_fields
from residua.plan import Plan
from residua.registry import build, design
from residua.spec import parse

Match = Literal["none", "params", "flops"]

MOST_SEEDS = 10_000
PLAN = "plan.json"
"""The plan, in the directory of its comparison."""
OWN = ("design", "layout", "width", "depth", "heads", "kv_heads", "seed", "threads")
"""Fields of a run that the plan sets itself: they do not belong in `[train]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a model."""

    width: int = 128
    depth: int = 6
    heads: int = 4
    kv_heads: int | None = None

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """The rates that every variant chooses from, and the seeds it chooses on."""

    lr: tuple[float, ...] = ()
    residual_lr: tuple[float, ...] = ()
    """Rates of the design's own parameters; empty: the same as lr."""
    seeds: tuple[int, ...] = (1000,)


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table: a design in a layout at a size."""

    design: str
    layout: str
    size: Size
    label: str

    @property
    def slug(self) -> str:
        """Its name as a folder."""
        return slug_of(self.label)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a plan."""

    variant: Variant
    config: TrainConfig
    folder: str
    """Below the output directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """Everything that decides the outcome of a comparison."""

    designs: tuple[str, ...]
    layouts: tuple[str, ...] = ("attn,mlp",)
    sizes: tuple[Size, ...] = (Size(),)
    seeds: tuple[int, ...] = (0, 1, 2)
    also: tuple[tuple[str, str], ...] = ()
    """More rows, each a design in a layout of its own, where not every design belongs in every layout."""
    baseline: str | None = None
    """The design that all others are compared with, in the first layout; the first design by default."""
    match: Match = "none"
    threads: int = 1
    """Per job: part of the plan, because sums in another order are other sums."""
    tune: Tune = Tune()
    chosen: Mapping[str, float] = field(default_factory=dict)
    """The learning rate of every row by its label, where an earlier comparison chose them."""
    train: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check()
        variants = self.variants()
        slugs = [variant.slug for variant in variants]
        for slug in slugs:
            if slugs.count(slug) > 1:
                clash = [variant.label for variant in variants if variant.slug == slug]
                raise ValueError(f"two rows would share the folder {slug}: {' and '.join(clash)}; drop or rename one")
        for variant in variants:  # builds every model without memory: a wrong design or size says so here
            for seed in self.seeds:
                self.config(variant, seed)
        folders = [run.folder for run in self.tuning()]  # makes every config of a tuning run, too
        for folder in folders:
            if folders.count(folder) > 1:
                raise ValueError(f"two tuning runs would share the folder {folder}: rates differ by less than is shown")

    @property
    def compared_with(self) -> str:
        """The baseline's design."""
        return self.baseline or self.designs[0]

    def variants(self) -> list[Variant]:
        """Every row, in the order of the plan."""
        rows = []
        pairs = [*product(self.layouts, self.designs), *((layout, spec) for spec, layout in self.also)]
        layouts = {layout for layout, _ in pairs}
        for size, (layout, spec) in product(self.sizes, pairs):
            parts = [spec]
            parts += [layout] if len(layouts) > 1 else []
            parts += [str(size)] if len(self.sizes) > 1 else []
            rows.append(Variant(spec, layout, size, " | ".join(parts)))
        return rows

    def baseline_of(self, variant: Variant) -> Variant:
        """What a row is compared with: the baseline's design in the first layout at the row's size."""
        for other in self.variants():
            if (other.design, other.layout, other.size) == (self.compared_with, self.layouts[0], variant.size):
                return other
        raise AssertionError("a plan holds its baseline")

    def config(self, variant: Variant, seed: int, **changes: Any) -> TrainConfig:
        """The run of a row and seed."""
        size = {name: value for name, value in asdict(variant.size).items() if value is not None}
        settings: Values = {**self.train, **size, "threads": self.threads, "seed": seed}
        if self.chosen:
            settings["lr"] = self.chosen[variant.label]
        plain = TrainConfig(**settings, design=variant.design, layout=variant.layout)
        if self.match != "none":
            goal = replace(plain, design=self.compared_with, layout=self.layouts[0])
            plain = replace(plain, mlp_width=matched_mlp_width(plain, goal, self.match))
        return replace(plain, **changes)

    def tuning(self) -> list[Run]:
        """The runs that choose the rates; none where no rates are given."""
        runs = []
        for variant in self.variants():
            for rates, seed in product(self.rates(variant), self.tune.seeds):
                name = "-".join(f"{key}{value:g}" for key, value in rates.items())
                folder = f"tune/{variant.slug}/{name}-seed{seed}"
                runs.append(Run(variant, self.config(variant, seed, **rates), folder))
        return runs

    def rates(self, variant: Variant) -> list[dict[str, float]]:
        """What a row chooses from: a design without parameters of its own has no residual rate."""
        if not self.tune.lr:
            return []
        import torch

        with torch.device("meta"):
            stream = build(variant.design, Plan.regular(variant.size.width, variant.size.depth, variant.layout))
        if not self.tune.residual_lr or not any(True for _ in stream.parameters()):
            return [{"lr": lr} for lr in self.tune.lr]
        return [{"lr": lr, "residual_lr": own} for lr, own in product(self.tune.lr, self.tune.residual_lr)]

    def runs(self, rates: Mapping[str, Mapping[str, float]]) -> list[Run]:
        """The runs of the table, with the rates chosen for each row (by label)."""
        return [
            Run(variant, self.config(variant, seed, **rates.get(variant.label, {})), f"runs/{variant.slug}/seed{seed}")
            for variant, seed in product(self.variants(), self.seeds)
        ]

    def to_json(self) -> Values:
        """Plain values."""
        values = json.loads(json.dumps(asdict(self)))
        for key in ("also", "chosen"):  # absent as in plans that were written before there was such a thing
            if not values[key]:
                del values[key]
        return values

    @classmethod
    def from_json(cls, values: Record) -> ComparePlan:
        """From TOML or JSON values; a wrong key or kind is an error that names it."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a plan is a table, not {values!r}")
        known = {each.name for each in fields(cls)}
        for key in values:
            if key not in known:
                raise ValueError(f"a plan has no {key!r}; it has {', '.join(sorted(known))}")
        if "designs" not in values:
            raise ValueError('a plan needs designs, such as designs = ["standard", "delta:blocks=4"]')
        settings = {**values}
        for key in ("designs", "layouts", "seeds"):
            if key in settings:
                settings[key] = _sequence(key, settings[key])
        if "sizes" in settings:
            settings["sizes"] = tuple(_table(Size, "sizes", one) for one in _sequence("sizes", settings["sizes"]))
        if "also" in settings:
            settings["also"] = tuple(_row(one) for one in _sequence("also", settings["also"]))
        if "tune" in settings:
            settings["tune"] = _table(Tune, "tune", settings["tune"])
        return cls(**settings)

    @property
    def digest(self) -> str:
        """A short name of everything here."""
        return json_digest(self.to_json())[:16]

    def _check(self) -> None:
        for key in ("designs", "layouts", "sizes", "seeds"):
            values: Sequence[object] = getattr(self, key)
            if not values:
                raise ValueError(f"a plan needs at least one of {key}")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"{key} names one twice: {', '.join(map(str, values))}")
        for key in ("designs", "layouts"):
            for value in getattr(self, key):
                if not isinstance(value, str):
                    raise ValueError(f"{key} are texts, not {value!r}")
        for size in self.sizes:
            if not isinstance(size, Size):
                raise ValueError(f"sizes are tables such as {{ depth = 6, width = 128 }}, not {size!r}")
        if not isinstance(self.tune, Tune):
            raise ValueError(f"tune is a table of lr, residual_lr and seeds, not {self.tune!r}")
        if self.baseline is not None and not isinstance(self.baseline, str):
            raise ValueError(f"baseline is a design, not {self.baseline!r}")
        if len(self.seeds) > MOST_SEEDS:
            raise ValueError(f"a plan has at most {MOST_SEEDS:,} seeds, not {len(self.seeds):,}")
        for spec in (*self.designs, *(spec for spec, _ in self.also)):
            design(parse(spec)[0])  # a misspelt one says so before anything is made of it
        for key, values in (("seeds", self.seeds), ("tune.seeds", self.tune.seeds)):
            for seed in values:
                if type(seed) is not int or seed < 0:
                    raise ValueError(f"{key} are whole numbers from 0 on, not {seed!r}")
        if self.match not in get_args(Match):
            raise ValueError(f"match is {', '.join(get_args(Match))}, not {self.match!r}")
        if type(self.threads) is not int or self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads!r}")
        if self.compared_with not in self.designs:
            raise ValueError(f"the baseline {self.compared_with!r} is not among the designs: {', '.join(self.designs)}")
        for key in ("lr", "residual_lr"):
            rates = getattr(self.tune, key)
            for rate in rates:
                if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
                    raise ValueError(f"tune.{key} are positive numbers, not {rate!r}")
            if len(set(rates)) < len(rates):
                raise ValueError(f"tune.{key} names a rate twice")
        if self.tune.residual_lr and not self.tune.lr:
            raise ValueError("tune.residual_lr needs tune.lr: rates are tuned together")
        if self.tune.lr:
            shared = set(self.seeds) & set(self.tune.seeds)
            if shared:
                raise ValueError(
                    f"seed {min(shared)} is used for tuning and for reporting, which biases the result. "
                    "Give tune.seeds of their own"
                )
            if not self.tune.seeds:
                raise ValueError("tuning needs at least one of tune.seeds")
            if len(set(self.tune.seeds)) < len(self.tune.seeds):
                raise ValueError(f"tune.seeds names one twice: {', '.join(map(str, self.tune.seeds))}")
        if not isinstance(self.train, Mapping):
            raise ValueError("[train] is a table of training fields")
        self._check_chosen()
        for key in self.train:
            if key in OWN:
                raise ValueError(
                    f"[train] must not set {key}: the plan's own designs, layouts, sizes, seeds or threads do"
                )
            if key not in config_fields():
                raise ValueError(
                    f"[train] has no {key!r}; it takes {', '.join(sorted(set(config_fields()) - set(OWN)))}"
                )
            if key in ("lr", "residual_lr") and getattr(self.tune, key):
                raise ValueError(f"[train] sets {key} and [tune] searches it; give one of them")
            if key == "mlp_width" and self.match != "none":
                raise ValueError(f"match={self.match} chooses mlp_width; drop one of them")

    def _check_chosen(self) -> None:
        """Every row has its rate there, or none has."""
        if not isinstance(self.chosen, Mapping):
            raise ValueError(f"[chosen] is a table from the label of a row to its learning rate, not {self.chosen!r}")
        if not self.chosen:
            return
        labels = [variant.label for variant in self.variants()]
        for label in (*self.chosen, *labels):
            if label not in self.chosen or label not in labels:
                raise ValueError(
                    f"[chosen] gives every row its learning rate, and {label!r} is "
                    f"{'no row' if label not in labels else 'not in it'}; the rows are {', '.join(labels)}"
                )
        for label, rate in self.chosen.items():
            if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
                raise ValueError(f"[chosen] holds positive numbers, not {rate!r} for {label}")
        for key, also in (("[tune]", bool(self.tune.lr)), ("[train]", "lr" in self.train)):
            if also:
                raise ValueError(f"[chosen] and {key} both set the learning rate; give one of them")


def slug_of(label: str) -> str:
    """A label as a key, and as the name of a folder or a file."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label).strip("-") or "run"


Table = TypeVar("Table", Size, Tune)


def read_plan(path: Path) -> ComparePlan:
    """The plan in a TOML file."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no plan file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return ComparePlan.from_json(values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _sequence(key: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{key} is a list, not {values!r}")
    return tuple(values)


def _row(values: Any) -> tuple[str, str]:
    """A design and its layout, from a TOML table or from the JSON of a plan."""
    listed = tuple(values) if isinstance(values, list | tuple) else ()
    pair = (values.get("design"), values.get("layout")) if isinstance(values, Mapping) else listed
    extra = set(values) - {"design", "layout"} if isinstance(values, Mapping) else set()
    if extra or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ValueError(f'also takes rows such as {{ design = "standard", layout = "swa,attn,mlp" }}, not {values!r}')
    return pair


def _table(cls: type[Table], key: str, values: object) -> Table:
    """A `Size` or `Tune` from a TOML table."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{key} takes tables, not {values!r}")
    known = {each.name: each for each in fields(cls)}
    settings = Values()
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{key} has no {name!r}; it takes {', '.join(known)}")
        if cls is Size and (type(value) is not int or value < 1) and value is not None:
            raise ValueError(f"{key}: {name} is a whole number from 1 on, not {value!r}")
        settings[name] = _sequence(f"{key}.{name}", value) if cls is Tune else value
    return cls(**settings)
