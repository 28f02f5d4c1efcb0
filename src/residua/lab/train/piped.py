"""A model whose stages lie on the ranks of a pipeline, as the loop sees it.

All rows of an update, those of every accumulated batch, go through the stages as the micro-batches of one step: the
more of them, the shorter a rank waits. Validation goes through the same stages, forward only, in steps of as many rows;
rows that are missing in the last are filled up with some that do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from residua.lab.common.files import Values
from residua.lab.train.config import TrainConfig
from residua.lab.train.diverge import Diverged, Eyes, Seen, explain_parameters, finite, first, in_the_loss, not_finite
from residua.lab.train.optim import group_of
from residua.lab.train.placement import Logits, Loss, Placement
from residua.lab.train.precision import autocast, execution
from residua.lab.train.ranks import Ranks
from residua.lab.train.recipe import Recipe
from residua.lab.train.sampler import Batch
from residua.lab.train.subject import OwnModel, sizes_of
from residua.model.objective import IGNORED
from residua.runner import observed
from residua.scale.pipeline import SCHEDULES, Pipeline
from residua.scale.stage import sharded


class PipedModel(OwnModel):
    """The stages of a `Transformer` on this rank; `model` is all of it by name, with this rank's tensors alone."""

    def __init__(self, config: TrainConfig, vocab: int, device: torch.device, ranks: Ranks) -> None:
        self.config, self.design, self.ranks = config, config.design, ranks
        layout, pipes, mesh = ranks.parallel, ranks.pipes, ranks.mesh
        assert pipes.microbatches is not None  # settled before ranks are there
        nested = not SCHEDULES[pipes.schedule].split  # torch 2.13 loses gradients otherwise
        shard = None
        if layout.fsdp > 1:
            narrow = None if config.dtype == "float32" else torch.bfloat16  # as it is multiplied under autocast
            shard = sharded(mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"], nested=nested, dtype=narrow)
        self.pipeline = Pipeline(
            config.model(vocab),
            mesh,
            schedule=pipes.schedule,
            microbatches=pipes.microbatches,
            virtual=pipes.virtual,
            rows=config.batch * config.accumulate // layout.copies,
            tokens=config.context,
            device=device,
            seed=config.seed,
            dtype=torch.get_default_dtype(),
            checkpointed=config.checkpointed,
            execution=execution(config),
            around=partial(autocast, config, device),
            shard=shard,
        )
        self.model = self.pipeline.own

    def place(self, config: Recipe) -> Placement:
        return Piped(config, self.pipeline, self.ranks)

    def sizes(self) -> dict[str, int]:
        whole = self.pipeline.model
        return sizes_of(whole, group_of(whole))

    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        raise NotImplementedError("the logits of a pipeline are on its last rank alone; see Pipeline.logits")

    def look(self, batch: Batch, logits: Tensor) -> Values:
        return {"stream_rms": self._stream_rms(batch)} if self.config.stream_rms else {}

    def _stream_rms(self, batch: Batch) -> dict[str, float]:
        """RMS of what every site reads, over the rows of a batch on all copies of the model."""
        squares: dict[str, list[Tensor]] = {}

        def look(seen: Seen) -> None:
            if seen.what == "read":
                squares.setdefault(seen.site, []).append(seen.tensor.float().square().mean((1, 2)))

        self._watch(batch, look)
        # of the first lane, micro-batch after micro-batch; rows that fill up come last
        firsts = {site: each[:: len(each) // self.pipeline.microbatches] for site, each in squares.items()}
        mine = {site: float(torch.cat(each)[: len(batch.inputs)].sum()) for site, each in firsts.items()}
        told = self.ranks.tell([len(batch.inputs), mine])
        rows = sum(count for count, _ in self.ranks.copies(told))
        return {
            site.name: (sum(sums.get(site.name, 0.0) for _, sums in told) / rows) ** 0.5
            for site in self.model.plan.readers
        }

    @torch.no_grad()
    def _watch(self, batch: Batch, look: Callable[[Seen], None]) -> None:
        """A forward pass of all stages, of which this rank looks at its own."""
        with ExitStack() as stack:
            for piece in self.pipeline.slices.values():
                stack.enter_context(observed(piece.net.stream, Eyes(look)))
            logits = self.pipeline.logits(filled(batch, self.pipeline.rows).inputs)
        if logits is not None:
            look(Seen("head", "logits", logits))

    def explain_loss(self, step: int, loss: float, batches: list[Batch]) -> Diverged:
        if broken := explain_parameters(self.model, step, loss, self.ranks):
            return broken
        order = {"embed": -1} | {site.name: site.index for site in self.model.plan.readers}
        broken_at: dict[int, tuple[str, str]] = {}
        largest: dict[int, float] = {}

        def look(seen: Seen) -> None:
            place = order[seen.site]
            if not finite(seen.tensor):
                broken_at.setdefault(place, (seen.site, seen.what))
            elif place not in broken_at:
                largest[place] = max(largest.get(place, 0.0), float(seen.tensor.abs().max()))

        for batch in batches:
            self._watch(batch, look)
        at = min(broken_at, default=len(order))
        told = self.ranks.tell([at, list(largest.items())])
        earliest = min(place for place, _ in told)
        before = max((size for _, sizes in told for place, size in sizes if place <= earliest), default=0.0)
        found = None
        if at == earliest and at in broken_at:
            found = at, broken_at[at][0], not_finite(loss, *broken_at[at], before)
        return first(step, found, self.ranks) or in_the_loss(step, loss)


class Piped(Placement):
    """The passes of an update through the stages of a pipeline."""

    def __init__(self, config: Recipe, pipeline: Pipeline, ranks: Ranks) -> None:
        self.pipeline, self.model, self.ranks, self.parallel = pipeline, pipeline.own, ranks, ranks.parallel
        if config.compile:
            raise ValueError("compile is not supported with pp: what a stage keeps for others is not compiled; drop it")

    def backward(
        self,
        loss: Loss,
        batches: Sequence[Batch],
        positions: int,
        around: Callable[[], AbstractContextManager[object]],
    ) -> float:
        whole = joined(batches)
        # torch's schedules leave the mean over the copies, of which each has its part of the positions
        mean = self.pipeline.step(whole.inputs, whole.targets, count=positions / self.copies)
        return float(mean) / self.copies

    def evaluate(self, logits: Logits, batch: Batch) -> tuple[float, Tensor]:
        whole = filled(batch, self.pipeline.rows)
        return float(self.pipeline.evaluate(whole.inputs, whole.targets)), torch.empty(0)

    def shares(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The first batch as it is, which is looked at; what follows, in steps of as many rows as an update has."""
        rest = iter(batches)
        for batch in (*[next(rest)], *regrouped(rest, self.pipeline.rows * self.copies)):
            rows = self.rows_of(len(batch.inputs))
            yield Batch(batch.inputs[rows], batch.targets[rows])

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return self.pipeline.gradient_norm()

    def at_rest(self) -> None:
        for piece in self.pipeline.slices.values():
            for unit in piece.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches."""
    return Batch(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches]))


def regrouped(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """The rows of all batches, in order, as many at a time."""
    held: Batch | None = None
    for batch in batches:
        held = batch if held is None else joined([held, batch])
        while len(held.inputs) >= rows:
            yield Batch(held.inputs[:rows], held.targets[:rows])
            held = Batch(held.inputs[rows:], held.targets[rows:])
    if held is not None and len(held.inputs):
        yield held


def filled(batch: Batch, rows: int) -> Batch:
    """A batch of `rows` rows, of which those that were not there do not count."""
    missing = rows - len(batch.inputs)
    if not missing:
        return batch
    inputs = batch.inputs.new_zeros(missing, batch.inputs.shape[1])
    return joined([batch, Batch(inputs, torch.full_like(inputs, IGNORED))])
