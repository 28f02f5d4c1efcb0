"""Designs on a synthetic task: accuracy after fixed steps and steps to 95 %, over seeds, against a baseline.

One seed gives every design the same sublayer weights and the same rows in the same order. With a grid of rates every
row chooses its own on a seed that is not reported. The differences are judged by the statistics of `lab.compare`:
what lies inside the noise is called "no difference".
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
from torch import Tensor

from residua._version import __version__
from residua.lab.common.files import Listener, Values
from residua.lab.common.stats import paired, spread
from residua.lab.tasks.kept import Kept
from residua.lab.tasks.registry import build
from residua.lab.tasks.task import Task, accuracy
from residua.lab.train import Diverged, TrainConfig, Trainer
from residua.lab.train.sampler import Batch, Batches
from residua.lab.train.subject import OwnModel
from residua.model import Transformer

Row = tuple[str, str]
"""A design and its layout."""
SOLVED = 0.95
TUNING_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecipe:
    """How every design is trained on a task."""

    steps: int = 500
    batch: int = 32
    lr: float = 2e-3
    width: int = 64
    depth: int = 4
    heads: int = 4
    layout: str = "attn,mlp"
    every: int = 25
    """Steps between tests."""
    tested: int = 256
    """Rows of a test, the same each time and never trained on."""

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "every", "tested"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be a positive number, not {self.lr}")

    def config(self, task: Task, design: str, layout: str, seed: int = 0) -> TrainConfig:
        """The run of a design: the rate rises over a twentieth of the steps and stays, and nothing decays."""
        rise = max(1, self.steps // 20) - 1
        return TrainConfig(
            design=design, layout=layout, width=self.width, depth=self.depth, heads=self.heads, steps=self.steps,
            batch=self.batch, context=max(2, task.length), lr=self.lr, schedule="wsd", warmup_share=rise / self.steps,
            decay_share=0.0, weight_decay=0.0, explode=sys.float_info.max, eval_every=self.every, device="cpu",
            seed=seed,
        )  # fmt: skip


class Rows(Batches):
    """Rows of a task, drawn from the seed one update after the other, and rows to test on that are never trained on."""

    def __init__(self, task: Task, config: TrainConfig, tested: int) -> None:
        self.task, self.size, self.vocab = task, config.batch, task.vocab
        self.drawn = torch.Generator().manual_seed(2 * config.seed + 1)
        self.held = task.batch(tested, torch.Generator().manual_seed(2 * config.seed + 2**32))

    def batches(self, step: int) -> list[Batch]:
        return [Batch(*self.task.batch(self.size, self.drawn)[:2])]

    def validation(self) -> Iterator[Batch]:
        yield Batch(self.held.ids, self.held.targets)


class Solver(OwnModel):
    """A model whose validation is scored by exact accuracy."""

    fused = False  # the committed results were made with the plain one

    def look(self, batch: Batch, logits: Tensor) -> Values:
        return {"accuracy": accuracy(logits, batch.targets)}


def requested(
    spec: str,
    designs: Sequence[str],
    seeds: Sequence[int],
    recipe: TaskRecipe,
    *,
    also: Sequence[Row] = (),
    rates: Sequence[float] = (),
) -> tuple[Task, list[Row], list[TaskRecipe]]:
    """The task, the rows and the recipes to try; whatever is wrong with a request is said here."""
    task = build(spec)
    tried = [replace(recipe, lr=rate) for rate in sorted(set(rates))]
    if tried and TUNING_SEED in seeds:
        raise ValueError(f"seed {TUNING_SEED} chooses the rates; a rate chosen on a reported seed flatters it")
    if not designs:
        raise ValueError("name at least one design")
    pairs = [*((design, recipe.layout) for design in designs), *also]
    for pair in pairs:
        if pairs.count(pair) > 1:
            raise ValueError(f"{_name(pair)} is named twice")
    for pair in pairs:
        recipe.config(task, *pair)  # builds it without memory: a wrong design or size says so here
    return task, pairs, tried


def run_task(
    spec: str,
    designs: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    recipe: TaskRecipe | None = None,
    on_event: Listener | None = None,
    *,
    also: Sequence[Row] = (),
    rates: Sequence[float] = (),
    kept: Kept | None = None,
) -> Values:
    """Train every design with every seed; a row a design, the first being the baseline.

    also:  more rows, each a design in a layout of its own.
    rates: every row takes its own best of these, found on a seed that is not reported; empty: the recipe's for all.
    kept:  where finished runs are, and go.

    A reported run that diverges is an error that names it; a rate that does while it is tried is not taken.
    """
    listen, kept, recipe = on_event or (lambda event: None), kept or Kept(), recipe or TaskRecipe()
    task, pairs, tried = requested(spec, designs, seeds, recipe, also=also, rates=rates)

    def run(pair: Row, seed: int, own: TaskRecipe) -> Values:
        asked = {
            "task": spec, "design": pair[0], "layout": pair[1], "seed": seed, "recipe": asdict(own),
            "residua": __version__, "torch": torch.__version__,
        }  # fmt: skip
        found = kept.get(asked)
        if found is None:
            found = json.loads(json.dumps(train_on(task, own.config(task, *pair, seed), own.tested)))
            kept.put(asked, found)
        listen({"kind": "finished", "design": pair[0], "layout": pair[1], "lr": own.lr, **found})
        return found

    chosen, notes = dict.fromkeys(pairs, recipe), list[str]()
    for pair in pairs if tried else ():
        chosen[pair] = _best(pair, tried, run, listen, notes)
    if not tried and len(pairs) > 1:
        notes.append("One learning rate for all, not tuned: a design that likes another is misjudged. --lr-grid tunes.")
    runs: dict[Row, list[Values]] = {pair: [] for pair in pairs}
    for pair, seed in product(pairs, seeds):
        try:
            runs[pair].append(run(pair, seed, chosen[pair]))
        except Diverged as broken:
            raise ValueError(
                f"{_name(pair)}, seed {seed}, diverged at lr {chosen[pair].lr:g}: {broken}; choose a smaller rate"
            ) from broken
    baseline = [run["accuracy"] for run in runs[pairs[0]]]
    rows = []
    for pair in pairs:
        found = [run["accuracy"] for run in runs[pair]]
        solved = [run["steps_to_solve"] for run in runs[pair]]
        gap = None if pair == pairs[0] else paired(found, baseline)
        rows.append(
            {
                "design": pair[0],
                "layout": pair[1],
                "parameters": runs[pair][0]["parameters"],
                "lr": chosen[pair].lr,
                "accuracy": asdict(spread(found)),
                "solved": sum(steps is not None for steps in solved),
                "steps_to_solve": None if None in solved else sum(solved) / len(solved),
                "difference": None if gap is None else asdict(gap) | {"significant": gap.significant},
                "runs": runs[pair],
            }
        )
    return {
        "task": spec, "separates": task.separates, "chance": task.chance, "seeds": list(seeds),
        "recipe": asdict(recipe), "rates": [one.lr for one in tried], "rows": rows, "notes": notes,
    }  # fmt: skip


def _best(
    pair: Row,
    tried: Sequence[TaskRecipe],
    run: Callable[[Row, int, TaskRecipe], Values],
    listen: Listener,
    notes: list[str],
) -> TaskRecipe:
    """The recipe with the highest accuracy on the tuning seed; of equals the first to solve, then the lowest rate."""
    name, found = _name(pair), dict[TaskRecipe, tuple[float, float]]()
    for one in tried:
        try:
            result = run(pair, TUNING_SEED, one)
        except Diverged as broken:
            listen({"kind": "diverged", "design": pair[0], "layout": pair[1], "lr": one.lr, "seed": TUNING_SEED,
                    "message": str(broken)})  # fmt: skip
            notes.append(f"{name}: diverged while tuning at lr {one.lr:g} ({broken}).")
            continue
        found[one] = (-result["accuracy"], result["steps_to_solve"] or math.inf)
    if not found:
        raise ValueError(f"every rate of {name} diverged; give smaller ones")
    best = min(found, key=lambda one: (found[one], one.lr))
    if len(tried) > 1 and best in (tried[0], tried[-1]):
        notes.append(f"{name}: its rate {best.lr:g} is at the edge of the grid; a better one may lie outside.")
    return best


def train_on(task: Task, config: TrainConfig, tested: int) -> Values:
    """One design, one seed: the accuracy on `tested` held-out rows at the end, and along the way."""
    rows = Rows(task, config, tested)
    subject = Solver(config, task.vocab, torch.device("cpu"))
    lines = Trainer(config, rows, subject).lines()
    curve = [(line["step"], line["accuracy"]) for line in lines if line["kind"] == "valid"]
    solved = next((step for step, share in curve if share >= SOLVED), None)
    parameters = sum(each.numel() for each in subject.model.parameters())
    result = {
        "seed": config.seed, "accuracy": curve[-1][1], "steps_to_solve": solved, "parameters": parameters,
        "curve": curve,
    }  # fmt: skip
    return result | _routing(subject.model, rows)


def _routing(model: Transformer, rows: Rows) -> Values:
    """Where the true routing is known, how well the recorded one follows it."""
    held = rows.held
    if "route" not in held.extra:
        return {}
    from residua.lab.diagnose import record_routing
    from residua.lab.tasks.routing import best_routing

    with torch.no_grad(), record_routing(model, similarity=False) as record:
        model(held.ids)
    truth = held.extra["route"]
    enough = {name: weights for name, weights in record.weights().items() if weights.shape[1] > int(truth.max())}
    return {"routing": best_routing(enough, truth)._asdict() if enough else None}


def _name(pair: Row) -> str:
    return f"{pair[0]} in {pair[1]}"
