"""What a plan must hold, found before anything is built or written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from residua.lab.compare.sizes import Size
from residua.lab.compare.tune import Tune
from residua.lab.train.config import config_fields
from residua.registry import design
from residua.spec import parse

if TYPE_CHECKING:
    from residua.lab.compare.plan import ComparePlan

Match = Literal["none", "params", "flops"]
MOST_SEEDS = 10_000
OWN = ("design", "layout", "width", "depth", "heads", "kv_heads", "seed", "threads")
"""Fields of a run that the plan sets itself: they do not belong in `[train]`."""


def check(plan: ComparePlan) -> None:
    """Refuse a plan that does not fit together, with one line that says what to change."""
    for key in ("designs", "layouts", "sizes", "seeds"):
        values: Sequence[object] = getattr(plan, key)
        if not values:
            raise ValueError(f"a plan needs at least one of {key}")
        if any(value in values[:place] for place, value in enumerate(values)):
            raise ValueError(f"{key} names one twice: {', '.join(map(str, values))}")
    for key in ("designs", "layouts"):
        for value in getattr(plan, key):
            if not isinstance(value, str):
                raise ValueError(f"{key} are texts, not {value!r}")
    for size in plan.sizes:
        if not isinstance(size, Size):
            raise ValueError(f"sizes are tables such as {{ depth = 6, width = 128 }}, not {size!r}")
    if not isinstance(plan.tune, Tune):
        raise ValueError(f"tune is a table of lr, residual_lr and seeds, not {plan.tune!r}")
    if plan.baseline is not None and not isinstance(plan.baseline, str):
        raise ValueError(f"baseline is a design, not {plan.baseline!r}")
    if len(plan.seeds) > MOST_SEEDS:
        raise ValueError(f"a plan has at most {MOST_SEEDS:,} seeds, not {len(plan.seeds):,}")
    for spec in (*plan.designs, *(spec for spec, _ in plan.also)):
        design(parse(spec)[0])  # a misspelt one says so before anything is made of it
    for key, values in (("seeds", plan.seeds), ("tune.seeds", plan.tune.seeds)):
        for seed in values:
            if type(seed) is not int or seed < 0:
                raise ValueError(f"{key} are whole numbers from 0 on, not {seed!r}")
    if plan.match not in get_args(Match):
        raise ValueError(f"match is {', '.join(get_args(Match))}, not {plan.match!r}")
    if type(plan.threads) is not int or plan.threads < 1:
        raise ValueError(f"threads must be at least 1, not {plan.threads!r}")
    if plan.compared_with not in plan.designs:
        raise ValueError(f"the baseline {plan.compared_with!r} is not among the designs: {', '.join(plan.designs)}")
    if not isinstance(plan.train, Mapping):
        raise ValueError("[train] is a table of training fields")
    for size in plan.sizes:
        size.check()
        if size.designs and not {plan.compared_with} <= set(size.designs) <= set(plan.designs):
            raise ValueError(f"the designs of size {size} are some of the plan's, the baseline among them")
        if size.tokens_per_parameter is not None and "steps" in plan.train:
            raise ValueError("[train] sets steps and a size tokens_per_parameter; give one of them")
    plan.tune.verify(plan.sizes, plan.designs)
    if plan.tune.carry != "none" and plan.sizes[0].designs:
        raise ValueError("tune.carry tunes every design at the first size; it has no designs of its own")
    _check_seeds(plan)
    _check_chosen(plan)
    for key in plan.train:
        if key in OWN:
            raise ValueError(f"[train] must not set {key}: the plan's own designs, layouts, sizes, seeds or threads do")
        if key not in config_fields():
            raise ValueError(f"[train] has no {key!r}; it takes {', '.join(sorted(set(config_fields()) - set(OWN)))}")
        if key in ("lr", "residual_lr") and getattr(plan.tune, key):
            raise ValueError(f"[train] sets {key} and [tune] searches it; give one of them")
        if key == "mlp_width" and plan.match != "none":
            raise ValueError(f"match={plan.match} chooses mlp_width; drop one of them")


def _check_seeds(plan: ComparePlan) -> None:
    if plan.tune.lr:
        shared = set(plan.seeds) & set(plan.tune.seeds)
        if shared:
            raise ValueError(
                f"seed {min(shared)} is used for tuning and for reporting, which biases the result. "
                "Give tune.seeds of their own"
            )
        if not plan.tune.seeds:
            raise ValueError("tuning needs at least one of tune.seeds")
        if len(set(plan.tune.seeds)) < len(plan.tune.seeds):
            raise ValueError(f"tune.seeds names one twice: {', '.join(map(str, plan.tune.seeds))}")
    own = [size.seeds for size in plan.sizes if size.seeds is not None]
    if own and max(own) > len(plan.seeds):
        raise ValueError(f"a size has {max(own)} seeds, and the plan lists {len(plan.seeds)}")
    if plan.until is not None:
        if own:
            raise ValueError("until adds seeds to all rows alike; sizes then have no seeds of their own")
        plan.until.check(len(plan.seeds))
    passes = plan.most_passes
    if passes is not None and (type(passes) not in (int, float) or not passes > 0):
        raise ValueError(f"most_passes is a positive number, not {passes!r}")


def _check_chosen(plan: ComparePlan) -> None:
    """Every row has its rate there, or none has."""
    if not isinstance(plan.chosen, Mapping):
        raise ValueError(f"[chosen] is a table from the label of a row to its learning rate, not {plan.chosen!r}")
    if not plan.chosen:
        return
    labels = [variant.label for variant in plan.variants()]
    for label in (*plan.chosen, *labels):
        if label not in plan.chosen or label not in labels:
            raise ValueError(
                f"[chosen] gives every row its learning rate, and {label!r} is "
                f"{'no row' if label not in labels else 'not in it'}; the rows are {', '.join(labels)}"
            )
    for label, rate in plan.chosen.items():
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise ValueError(f"[chosen] holds positive numbers, not {rate!r} for {label}")
    for key, also in (("[tune]", bool(plan.tune.lr)), ("[train]", "lr" in plan.train)):
        if also:
            raise ValueError(f"[chosen] and {key} both set the learning rate; give one of them")
