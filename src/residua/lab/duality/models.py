"""What the theorem is run on: drawn stacks, and stacks and weights out of trained models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from residua.lab.duality.reads import Given, Stack
from residua.model import ModelConfig, Transformer, generate
from residua.stream import Routing

DESIGNS = (
    "depthswa",
    "depthswa:window=3,sources=deltas,unit=sublayer,enter=add,heads=2,key_norm=true",
    "attnres",
)
"""What `trained_subjects` trains: the read itself twice, over states and over deltas, and a stack of another design."""


@dataclass(frozen=True)
class Subject:
    """A model, the stack of one of its forwards, and the weights to read it with."""

    name: str
    trained: bool
    given: Given
    """In float64."""
    model: Transformer
    ids: Tensor
    reads: Stack | None = None
    """What the model's own sites read from its own stack: only `depthswa` has these."""
    window: int | None = None
    """Of those reads."""


def random_subject(seed: int = 0, *, width: int = 32, depth: int = 6, heads: int = 2) -> Subject:
    """A drawn model, and a drawn stack that no model made."""
    config = ModelConfig(vocab=64, width=width, depth=depth, heads=heads, mlp_width=2 * width, init_std=0.3)
    draw = torch.Generator().manual_seed(seed)
    stack = torch.randn(depth + 1, 2, 12, width, generator=draw, dtype=torch.float64)
    weights = _drawn(width, draw)
    ids = torch.randint(config.vocab, (2, 12), generator=draw)
    return Subject(f"random {seed}", False, Given(stack, *weights, heads=heads), Transformer(config, seed=seed), ids)


def from_run(path: Path | str) -> Subject:
    """The model of a directory that `residua train` wrote."""
    from residua.lab.train import load_model

    model = load_model(path)
    if not model.config.causal:
        raise ValueError(f"{path} holds an encoder; the duality is about causal models")
    return subject(f"trained {model.stream.spec}", model)


def trained_subjects(
    designs: Sequence[str] = DESIGNS,
    *,
    steps: int = 60,
    corpus: str = "pydoc",
    on_event: Callable[[dict[str, object]], None] | None = None,
) -> list[Subject]:
    """Train one small model for each design, with the library's own loop, in a directory that is deleted."""
    from residua.lab.train import TrainConfig, train

    found = []
    for design in designs:
        config = TrainConfig(
            design=design, width=32, depth=5, heads=2, mlp_width=64, corpus=corpus, steps=steps, batch=4, context=64,
            lr=4e-3, eval_every=steps, eval_windows=4, save_every=steps,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            result = train(config, Path(folder) / "run")
            found.append(from_run(Path(folder) / "run"))
        if on_event is not None:
            on_event({"design": design, "steps": steps, "loss": result.loss})
    return found


@torch.no_grad()
def subject(name: str, model: Transformer, tokens: int = 12) -> Subject:
    """The stack that a trained model makes of text of its own."""
    draw = torch.Generator().manual_seed(1)
    first = torch.randint(model.config.vocab, (2, 1), generator=draw)
    ids = generate(model, first, tokens - 1, temperature=1.0, generator=draw)
    model = model.double()
    stream = model.stream
    options, projections = stream.options, getattr(stream, "shared", None)
    if stream.name != "depthswa" or projections is None or not projections.chooses:
        stack = stack_of(model, ids)
        given = Given(stack, *_drawn(stack.shape[-1], draw), heads=model.config.heads)
        return Subject(name, True, given, model, ids)
    by_layer, deltas = options["unit"] == "layer", options["sources"] == "deltas"
    weights = projections.query, projections.key, projections.value
    stack = stack_of(model, ids, deltas=deltas, by_layer=by_layer)
    given = Given(stack, *weights, heads=int(options["heads"]), key_norm=bool(options["key_norm"]))
    if options["enter"] not in ("input", "add"):  # there a source need not be a sum of changes, nor have one read
        return Subject(name, True, given, model, ids)
    return Subject(name, True, given, model, ids, own_reads(model, ids), int(options["window"]))


def stack_of(model: Transformer, ids: Tensor, *, deltas: bool = False, by_layer: bool = True) -> Stack:
    """The embedding and what every block (or sublayer) added to it: as it was added, or summed up."""
    added: dict[int, list[Tensor]] = {}
    for step in model.walk(ids):
        if step.y is not None:
            own = step.y.detach()[..., : model.plan.width]  # a design may ask for channels beyond the width
            added.setdefault(step.site.layer if by_layer else step.site.index, []).append(own)
    stack = torch.stack([model.embed(ids).detach(), *(torch.stack(each).sum(0) for each in added.values())])
    return stack if deltas else stack.cumsum(0)


def own_reads(model: Transformer, ids: Tensor) -> Stack:
    """What every site that reads took from its sources, in the forward itself."""
    from residua.testing import walk

    found = []
    for site, state, _ in walk(model, ids):
        routing = model.stream.routing(state, site)
        if routing is not None:
            found.append(Routing(routing.values, routing.weights).mixed()[0])
    return torch.stack(found)


def _drawn(width: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, width, width, generator=draw, dtype=torch.float64) * width**-0.5
    return query, key, value
