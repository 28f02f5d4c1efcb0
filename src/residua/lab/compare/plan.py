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
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from residua.lab.common.files import Record, Values, json_digest
from residua.lab.compare.match import matched_mlp_width
from residua.lab.compare.sizes import Size as Size
from residua.lab.compare.sizes import budget_steps
from residua.lab.compare.tune import AROUND
from residua.lab.compare.tune import Tune as Tune
from residua.lab.compare.until import Until
from residua.lab.train import TrainConfig
from residua.lab.train.config import config_fields
from residua.plan import Plan
from residua.registry import build, design
from residua.spec import parse

LATER_OF_TUNE = ("carry", "check", "check_designs")
Match = Literal["none", "params", "flops"]

PLAN = "plan.json"
"""The plan, in the directory of its comparison."""
OWN = ("design", "layout", "width", "depth", "heads", "kv_heads", "seed", "threads")
"""Fields of a run that the plan sets itself: they do not belong in `[train]`."""
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
    until: Until | None = None
    """Add seeds until the differences are resolved; None: the seeds of the plan."""
    most_passes: float | None = None
    """How often a run may pass its text; None: as often as it does."""
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
        """The runs that check the rule that carried these rates (by label): three around each, at one higher size."""
        names = self.tune.check_designs or tuple(variant.design for variant in self.variants())
        return [
            self._trial("check", variant, {key: rate * factor for key, rate in rates[variant.label].items()}, seed)
            for variant in self.variants()
            if str(variant.size) == self.tune.check and variant.design in names and variant.label in rates
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
        if not self.tune.residual_lr:
            return [{"lr": lr} for lr in self.tune.lr]
        import torch

        with torch.device("meta"):
            stream = build(variant.design, Plan.regular(variant.size.width, variant.size.depth, variant.layout))
        if not any(True for _ in stream.parameters()):
            return [{"lr": lr} for lr in self.tune.lr]
        return [{"lr": lr, "residual_lr": own} for lr, own in product(self.tune.lr, self.tune.residual_lr)]

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
        for table, later in ((values, ("also", "until", "most_passes")), (values["tune"], LATER_OF_TUNE)):
            for key in later:
                if not table[key] or table[key] == "none":
                    del table[key]
        for size in values["sizes"]:
            for key in ("tokens_per_parameter", "seeds", "designs"):
                if not size[key]:
                    del size[key]
        return values

    @classmethod
    def from_json(cls, values: Record) -> ComparePlan:
        """From TOML or JSON values; a wrong key or kind is an error that names it."""
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
        if settings.get("until") is not None:
            settings["until"] = _table(Until, "until", settings["until"])
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
            if len(set(values)) < len(values):
                raise ValueError(f"{key} names one twice: {', '.join(map(str, values))}")
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
        for size in self.sizes:
            size.check()
            if size.designs and not {self.compared_with} <= set(size.designs) <= set(self.designs):
                raise ValueError(f"the designs of size {size} are some of the plan's, the baseline among them")
            if size.tokens_per_parameter is not None and "steps" in self.train:
                raise ValueError("[train] sets steps and a size tokens_per_parameter; give one of them")
        self.tune.verify(self.sizes, self.designs)
        if self.tune.carry != "none" and self.sizes[0].designs:
            raise ValueError("tune.carry tunes every design at the first size; it has no designs of its own")
        self._check_seeds()
        if not isinstance(self.train, Mapping):
            raise ValueError("[train] is a table of training fields")
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

    def _check_seeds(self) -> None:
        if self.tune.lr:
            shared = set(self.seeds) & set(self.tune.seeds)
            if shared:
                raise ValueError(
                    f"seed {min(shared)} is used for tuning and for reporting, which biases the result. "
                    "Give tune.seeds of their own"
                )
            if not self.tune.seeds:
                raise ValueError("tuning needs at least one of tune.seeds")
        own = [size.seeds for size in self.sizes if size.seeds is not None]
        if own and max(own) > len(self.seeds):
            raise ValueError(f"a size has {max(own)} seeds, and the plan lists {len(self.seeds)}")
        if self.until is not None:
            if own:
                raise ValueError("until adds seeds to all rows alike; sizes then have no seeds of their own")
            self.until.check(len(self.seeds))
        passes = self.most_passes
        if passes is not None and (type(passes) not in (int, float) or not passes > 0):
            raise ValueError(f"most_passes is a positive number, not {passes!r}")


def slug_of(label: str) -> str:
    """A label as a key, and as the name of a folder or a file."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label).strip("-") or "run"


Table = TypeVar("Table", Size, Tune, Until)


def read_plan(path: Path) -> ComparePlan:
    """The plan in a TOML file."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no plan file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    pair = (values.get("design"), values.get("layout")) if isinstance(values, Mapping) else tuple(values)
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
