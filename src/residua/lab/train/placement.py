"""How a model lies on the ranks of a run: whole, in copies (DDP), in pieces (FSDP2), or split (tensor parallel); stages
of a pipeline are in `residua.lab.train.piped`.

The loop sees one model. `backward` runs the passes of an update, `evaluate` one without gradients, and
`gradients_ready` makes the gradients those of the whole batch, whatever lies where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from residua.lab.train.ranks import Ranks
from residua.lab.train.recipe import Recipe
from residua.lab.train.sampler import Batch
from residua.model import ModelConfig, Transformer, token_loss
from residua.model.objective import IGNORED
from residua.runner import Execution

Logits = Callable[[Tensor, Any], Tensor]
"""Of token ids, by a model or what stands for it."""
Loss = Callable[[Batch, Any], Tensor]
"""The mean over the counted positions of a batch, likewise."""


def place(model: ModelConfig, seed: int, execution: Execution, ranks: Ranks, device: torch.device) -> Transformer:
    """A model with its start, on this rank: all of it, or its pieces, which are then all that ever existed here."""
    if not ranks.parallel.sharded:
        made = Transformer(model, seed=seed).to(device)
        made.execution = execution
        return made
    from residua.scale.shard import shard
    from residua.scale.split import split
    from residua.scale.start import materialise

    with torch.device("meta"):
        made = Transformer(model)
    made.execution = execution
    if ranks.parallel.tp > 1:
        split(made, ranks.mesh["tp"])
    if ranks.parallel.fsdp > 1:
        # under autocast a matrix is multiplied in bfloat16: it may as well travel so
        dtype = None if execution.dtype is None else torch.bfloat16
        copies = ranks.parallel.dp > 1
        mesh = ranks.mesh["dp", "fsdp"] if copies else ranks.mesh["fsdp"]
        shard(made, mesh, dtype=dtype, offload=ranks.offload)
    return materialise(made, seed, "cpu" if ranks.offload else device)


class Placement:
    """The passes of an update through a model that lies on several ranks."""

    def __init__(self, config: Recipe, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks, self.parallel = model, ranks, ranks.parallel
        self.forward: Any = model
        if config.compile:
            self.forward = torch.compile(model) if ranks.alone else _by_block(model)
        if self.parallel.dp > 1 and not self.parallel.sharded:
            from torch.nn.parallel import DistributedDataParallel

            self.forward = DistributedDataParallel(self.forward)

    @property
    def copies(self) -> int:
        """Of the model, with rows of their own: gradients come out as the mean over them."""
        return self.parallel.copies

    def backward(
        self,
        loss: Loss,
        batches: Sequence[Batch],
        positions: int,
        around: Callable[[], AbstractContextManager[object]],
    ) -> float:
        """Gradients of the sum of the losses of all batches over `positions`; this rank's part of that sum.

        around: makes the context of a forward pass.
        """
        total, copies = 0.0, self.copies
        for turn, batch in enumerate(batches):
            with self.turn(last=turn == len(batches) - 1):
                with around():
                    part = loss(batch, self.forward) * (batch.counted / positions)
                (part if copies == 1 else part * copies).backward()
            total += float(part.detach())
        return total

    def evaluate(self, logits: Logits, batch: Batch) -> tuple[float, Tensor]:
        """The mean loss of this rank's rows, and their logits where they are here, without gradients."""
        out = logits(batch.inputs, self.model)
        return float(token_loss(out, batch.targets)), out

    def shares(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's rows of every batch. A rank without any runs along with a row that does not count."""
        for batch in batches:
            rows = self.rows_of(len(batch.inputs))
            if rows.start == rows.stop:
                yield Batch(batch.inputs[:1], torch.full_like(batch.targets[:1], IGNORED))
            else:
                yield batch if self.copies == 1 else Batch(batch.inputs[rows], batch.targets[rows])

    def rows_of(self, count: int) -> slice:
        """Those of `count` rows that this rank's copy of the model takes."""
        return slice(count * self.ranks.copy // self.copies, count * (self.ranks.copy + 1) // self.copies)

    def turn(self, last: bool) -> AbstractContextManager[Any]:
        """Around one of the forward and backward passes of an update: ranks exchange gradients in the last."""
        if self.parallel.fsdp > 1:
            self.forward.set_requires_gradient_sync(last)
        elif hasattr(self.forward, "no_sync") and not last:
            return self.forward.no_sync()
        return nullcontext()

    def gradients_ready(self, scale: float) -> None:
        """After the last backward pass: what is left to exchange, and all gradients times `scale`."""
        if self.parallel.tp > 1:
            from residua.scale.split import settle

            settle(self.model, self.ranks.mesh["tp"], None if self.parallel.fsdp > 1 else self.ranks.mesh["dp"])
        if scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(scale)

    def at_rest(self) -> None:
        """After passes without gradients: what they gathered is let go, so that parameters are pieces again.

        FSDP keeps the root's whole until a backward pass comes, and a list of parameters made meanwhile would be of
        others than those that get gradients.
        """
        if self.parallel.fsdp > 1:
            self.forward.reshard()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Of all gradients together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self.parallel.sharded:
            return torch.nn.utils.get_total_norm(gradients)
        # norms of pieces add up only among tensors that lie alike
        alike: dict[Any, list[Tensor]] = {}
        for each in gradients:
            alike.setdefault(getattr(each, "placements", None), []).append(each)
        return torch.linalg.vector_norm(
            torch.stack([whole(torch.nn.utils.get_total_norm(some)) for some in alike.values()])
        )

    def clip(self, parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
        """Scale all gradients so that their norm is at most `most`."""
        if not self.parallel.sharded:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
            return
        share = (most / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(share)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor, or the tensor."""
    piece: Any = getattr(tensor, "to_local", None)
    return tensor if piece is None else piece()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, whose pieces lie on the ranks; a collective where there are pieces."""
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _by_block(model: nn.Module) -> nn.Module:
    """Compile every block by itself: what lies between them are the exchanges of FSDP."""
    blocks: Any = model.blocks
    dynamo: Any = torch._dynamo
    # each has sites of its own, with and without gradients, and a last batch of fewer rows
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 4 * len(blocks))
    for block in blocks:
        block.compile()
    return model
