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
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from residua.lab.common.files import Record, Values, json_digest
from residua.lab.compare.checks import Match, check
from residua.lab.compare.match import matched_mlp_width
from residua.lab.compare.sizes import Size as Size
from residua.lab.compare.sizes import budget_steps
from residua.lab.compare.tune import AROUND
from residua.lab.compare.tune import Tune as Tune
from residua.lab.compare.until import Until
from residua.lab.train import TrainConfig
from residua.plan import Plan
from residua.registry import build

LATER_OF_TUNE = ("close", "carry", "check", "check_designs")

PLAN = "plan.json"
"""The plan, in the directory of its comparison."""
SHAPE = ("width", "depth", "heads", "kv_heads")
"""Those of them that a size has."""


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
    tune: Tune = field(default_factory=Tune)
    chosen: Mapping[str, float] = field(default_factory=dict)
    """The learning rate of every row by its label, where an earlier comparison chose them."""
    until: Until | None = None
    """Add seeds until the differences are resolved; None: the seeds of the plan."""
    most_passes: float | None = None
    """How often a run may pass its text; None: as often as it does."""
    train: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        variants = self.variants()
        slugs = [variant.slug for variant in variants]
        for slug in slugs:
            if slugs.count(slug) > 1:
                clash = [variant.label for variant in variants if variant.slug == slug]
                raise ValueError(f"two rows would share the folder {slug}: {' and '.join(clash)}; drop or rename one")
        for variant in variants:  # builds every model without memory: a wrong design or size says so here
            self.config(variant, self.seeds[0])

    def looks(self) -> list[ComparePlan]:
        """The plan at every look that it may take: itself, or with more and more seeds, none of them a tuning seed."""
        if self.until is None:
            return [self]
        first = max(self.seeds) + 1
        own = [seed for seed in range(first, first + 2 * self.until.most_seeds) if seed not in self.tune.seeds]
        until = replace(self.until, began=self.until.began or len(self.seeds))
        return [
            replace(self, seeds=(*self.seeds, *own)[:count], until=until)
            for count in self.until.counts(len(self.seeds))
        ]

    def seeds_of(self, variant: Variant) -> tuple[int, ...]:
        """The seeds of a row."""
        return self.seeds[: variant.size.seeds]

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
            if size.designs and spec not in size.designs:
                continue
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
        size = {name: getattr(variant.size, name) for name in SHAPE if getattr(variant.size, name) is not None}
        settings: Values = {**self.train, **size, "threads": self.threads, "seed": seed}
        if variant.size.tokens_per_parameter is not None:
            goal = TrainConfig(**settings, design=self.compared_with, layout=self.layouts[0])
            settings["steps"] = budget_steps(goal, variant.size.tokens_per_parameter)
        if self.chosen:
            settings["lr"] = self.chosen[variant.label]
        plain = TrainConfig(**settings, design=variant.design, layout=variant.layout)
        if self.match != "none":
            goal = replace(plain, design=self.compared_with, layout=self.layouts[0])
            plain = replace(plain, mlp_width=matched_mlp_width(plain, goal, self.match))
        return replace(plain, **changes)

    def tuning(self) -> list[Run]:
        """The runs that choose the rates; none where no rates are given."""
        return [
            self._trial("tune", variant, rates, seed)
            for variant in self.variants()
            if self.tuned_as(variant) == variant
            for rates, seed in product(self.rates(variant), self.tune.seeds)
        ]

    def checking(self, rates: Mapping[str, Mapping[str, float]]) -> list[Run]:
        """The runs that check the rule that carried these rates (by label): three around each, at other sizes."""
        names = self.tune.check_designs or tuple(variant.design for variant in self.variants())
        return [
            self._trial("check", variant, {key: rate * factor for key, rate in rates[variant.label].items()}, seed)
            for variant in self.variants()
            if str(variant.size) in self.tune.check and variant.design in names and variant.label in rates
            for factor, seed in product(AROUND, self.tune.seeds)
        ]

    def tuned_as(self, variant: Variant) -> Variant:
        """The row whose grid chooses the rates of this one: its own, or that at the first size where a rule carries."""
        if self.tune.carry == "none":
            return variant
        first = replace(variant, size=self.sizes[0], label="")
        return next(one for one in self.variants() if replace(one, label="") == first)

    def _trial(self, kind: str, variant: Variant, rates: Mapping[str, float], seed: int) -> Run:
        name = "-".join(f"{key}{value:g}" for key, value in rates.items())
        return Run(variant, self.config(variant, seed, **rates), f"{kind}/{variant.slug}/{name}-seed{seed}")

    def rates(self, variant: Variant) -> list[dict[str, float]]:
        """What a row chooses from: a design without parameters of its own has no residual rate."""
        rates = variant.size.lr or self.tune.lr
        if not self.tune.residual_lr:
            return [{"lr": lr} for lr in rates]
        from residua.counting.shapes import unfilled

        with unfilled():
            stream = build(variant.design, Plan.regular(variant.size.width, variant.size.depth, variant.layout))
        if not any(True for _ in stream.parameters()):
            return [{"lr": lr} for lr in rates]
        return [{"lr": lr, "residual_lr": own} for lr, own in product(rates, self.tune.residual_lr)]

    def runs(self, rates: Mapping[str, Mapping[str, float]]) -> list[Run]:
        """The runs of the table, with the rates chosen for each row (by label)."""
        return [
            Run(variant, self.config(variant, seed, **rates.get(variant.label, {})), f"runs/{variant.slug}/seed{seed}")
            for variant in self.variants()
            for seed in self.seeds_of(variant)
        ]

    def to_json(self) -> Values:
        """Plain values."""
        values = json.loads(json.dumps(asdict(self)))
        # what is not used is absent, as in plans that were written before there was such a thing
        for table, later in ((values, ("also", "chosen", "until", "most_passes")), (values["tune"], LATER_OF_TUNE)):
            for key in later:
                if not table[key] or table[key] == "none":
                    del table[key]
        if len(check := values["tune"].get("check", ())) == 1:
            values["tune"]["check"] = check[0]
        for size in values["sizes"]:
            for key in ("tokens_per_parameter", "seeds", "designs", "lr"):
                if not size[key]:
                    del size[key]
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
            settings["tune"] = _table(Tune, "tune", _listed_check(settings["tune"]))
        if settings.get("until") is not None:
            settings["until"] = _table(Until, "until", settings["until"])
        return cls(**settings)

    @property
    def digest(self) -> str:
        """A short name of everything here."""
        return json_digest(self.to_json())[:16]


def slug_of(label: str) -> str:
    """A label as a key, and as the name of a folder or a file."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label).strip("-") or "run"


Table = TypeVar("Table", Size, Tune, Until)


def read_plan(path: Path) -> ComparePlan:
    """The plan in a TOML file."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        from residua.lab.compare.recipes import recipe_names

        raise ValueError(f"no plan file {path}; shipped plans: {', '.join(recipe_names())}") from None
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


def _listed_check(tune: Any) -> Any:
    """The table with its one size of a check as a list of sizes."""
    one = isinstance(tune, Mapping) and isinstance(tune.get("check"), str)
    return {**tune, "check": [tune["check"]]} if one else tune


def _row(values: Any) -> tuple[str, str]:
    """A design and its layout, from a TOML table or from the JSON of a plan."""
    listed = tuple(values) if isinstance(values, list | tuple) else ()
    pair = (values.get("design"), values.get("layout")) if isinstance(values, Mapping) else listed
    extra = set(values) - {"design", "layout"} if isinstance(values, Mapping) else set()
    if extra or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ValueError(f'also takes rows such as {{ design = "standard", layout = "swa,attn,mlp" }}, not {values!r}')
    return pair


def _table(cls: type[Table], key: str, values: object) -> Table:
    """A `Size`, a `Tune` or an `Until` from a TOML table."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{key} takes tables, not {values!r}")
    known = {each.name: each for each in fields(cls)}
    settings = Values()
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{key} has no {name!r}; it takes {', '.join(known)}")
        listed = isinstance(known[name].default, tuple)
        settings[name] = _sequence(f"{key}.{name}", value) if listed else value
    return cls(**settings)
