"""Pipeline parallelism on the schedules of torch: stages of whole blocks, and only what the next rank lacks between.

    pipeline = Pipeline(config, mesh, schedule="interleaved", microbatches=8, rows=32, tokens=2048, device=device)
    loss = pipeline.step(inputs, targets)            # gradients are left on pipeline.named_parameters()

Every rank of the mesh's `pp` axis builds the model without data and fills its own blocks alone, with the numbers that
one process would have. Schedules, stages and sends are those of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from residua.counting.shapes import unfilled
from residua.model.config import ModelConfig
from residua.model.objective import IGNORED, token_loss
from residua.model.transformer import Transformer
from residua.runner import Execution
from residua.scale.cuts import Cuts, Link, Route, even, links, looped, routes
from residua.scale.schedules import SCHEDULES as SCHEDULES
from residua.scale.schedules import check as check
from residua.scale.schedules import check_split as check_split
from residua.scale.schedules import orders as orders
from residua.scale.stage import Depot, Slice, fill, strip, tensors_of


class Pipeline:
    """A model whose blocks lie on the ranks of a mesh's `pp` axis.

    mesh:         has an axis `pp`. Over an axis `dp` gradients are averaged, unless `shard` is given, which then has
                  to see to it.
    microbatches: parts of a step's rows, which are in flight at the same time.
    rows, tokens: of a step, on this replica.
    dtype:        of parameters; they are drawn in torch's default type.
    virtual:      stages on a rank.
    incremental:  a rank keeps what its later stages need, and is not sent it again.
    around:       makes the context of every forward pass of a stage: autocast.
    shard:        called with every stage's module on the meta device, to shard its parameters (`fully_shard`); the
                  module itself must become an FSDP unit.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        *,
        schedule: str = "1f1b",
        microbatches: int,
        rows: int,
        tokens: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        virtual: int | None = None,
        incremental: bool = True,
        checkpointed: bool = False,
        execution: Execution | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        shard: Callable[[Slice], object] | None = None,
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if "tp" in names and mesh["tp"].size() > 1:
            raise ValueError("pp with tp is not supported: a stage's blocks lie on one rank, or are sharded by fsdp")
        axis = mesh["pp"] if mesh.ndim > 1 else mesh
        self.config, self.microbatches, self.rows, self.tokens = config, microbatches, rows, tokens
        self.device, self.group, self.rank = torch.device(device), axis.get_group(), axis.get_local_rank()
        self.split = SCHEDULES[schedule].split if schedule in SCHEDULES else False
        stages = check(config, axis.size(), schedule, microbatches=microbatches, rows=rows, virtual=virtual)
        execution = execution or Execution()
        if self.split:  # groups of reads share autograd nodes, which torch cannot split into inputs and weights
            execution = Execution(execution.dtype, execution.autocast, group=0)
        self.model = _on_meta(config, torch.get_default_dtype(), execution)
        """The whole model by name, without data."""
        self.cuts = Cuts.of(_on_meta(config, dtype, execution), rows // microbatches, tokens)
        self.plan = routes(self.cuts, even(config.depth, stages), looped(stages, axis.size()), incremental=incremental)
        if self.split:
            check_split(config, self.cuts, self.plan)
        self.depot = Depot()
        self.slices: dict[int, Slice] = {}
        for route in self.plan:
            if route.rank == self.rank:
                net = strip(_on_meta(config, dtype, execution), self.cuts.held(route.layers))
                piece = Slice(net, route, self.cuts, self.depot, tokens, checkpointed=checkpointed, around=around)
                if shard is not None:
                    shard(piece)
                    self._check_units(piece)
                self.slices[route.stage] = piece
        self._held = self._allocate()
        fill(self.model, seed, self._held)
        self.own = _with(_on_meta(config, dtype, execution), {name: first for name, (first, *_) in self._held.items()})
        """The model by name, with the tensors of this rank alone: what an optimizer and a checkpoint see of it."""
        self._replicas = None if shard is not None else _replicas(mesh)
        self._shared = self._groups()
        self._count = torch.ones((), device=self.device)
        made = [self._stage(route, stages) for route in self.plan if route.rank == self.rank]
        known = SCHEDULES[schedule]
        self.engine = known.engine(
            made if known.several else made[0], microbatches, loss_fn=self._loss, scale_grads=False
        )

    @property
    def links(self) -> list[Link]:
        """What crosses every boundary between two ranks, a micro-batch."""
        return links(self.cuts, self.plan)

    @property
    def last(self) -> bool:
        """Whether this rank has the head."""
        return len(self.plan) - 1 in self.slices

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank, once each, under the names that they have in the whole model."""
        for name, (first, *_) in self._held.items():
            if isinstance(first, nn.Parameter):
                yield name, first

    def parameters(self) -> Iterator[nn.Parameter]:
        """Without their names."""
        return (parameter for _, parameter in self.named_parameters())

    def owns(self, name: str) -> bool:
        """Whether this rank is the first that holds a tensor: what several ranks hold counts, or is written, once."""
        return self._ranks(name)[0] == self.rank

    def step(self, inputs: Tensor, targets: Tensor, *, count: Tensor | float | None = None, **rows: Tensor) -> Tensor:
        """The loss of a batch, on every rank; its gradients are left on the parameters, which must have none before.

        count: what the sum of the losses of this replica's tokens is divided by; by default their number.
        rows:  `mask` or `documents`, as a Transformer takes them.
        """
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise ValueError("gradients of an earlier step are still there; micro-batches are what accumulates")
        loss = self._run(self.engine.step, inputs, targets, count, rows)
        self._settle()
        return loss

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensor, targets: Tensor, *, count: Tensor | float | None = None, **rows: Tensor
    ) -> Tensor:
        """The loss of a batch, on every rank, forward only."""
        return self._run(self.engine.eval, inputs, targets, count, rows)

    @torch.no_grad()
    def logits(self, inputs: Tensor, **rows: Tensor) -> Tensor | None:
        """Of a batch, on the rank that has the head; None elsewhere."""
        kept: list[Tensor] = []
        self._run(self.engine.eval, inputs, inputs, None, rows, kept)
        return kept[0] if kept else None

    def gradient_norm(self) -> Tensor:
        """Of all gradients of this replica, every parameter counted once; the same on every rank of the pipeline."""
        own = [p.grad for name, p in self.named_parameters() if p.grad is not None and self.owns(name)]
        norm = torch.nn.utils.get_total_norm(own)
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square().to(self.device)
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _run(
        self,
        run: Callable[..., Tensor | None],
        inputs: Tensor,
        targets: Tensor,
        count: Tensor | float | None,
        rows: Mapping[str, Tensor],
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        if inputs.shape != (self.rows, self.tokens):
            raise ValueError(
                f"this pipeline takes batches of {self.rows} x {self.tokens} tokens, not "
                f"{' x '.join(map(str, inputs.shape))}"
            )
        self._refresh()
        counted = (targets != IGNORED).sum().clamp_min(1) if count is None else torch.as_tensor(count)
        self._count = counted.to(self.device)
        losses: list[Tensor] = []
        try:
            out = run(
                *((inputs,) if 0 in self.slices else ()),
                target=targets if self.last else None,
                losses=losses,
                return_outputs=kept is not None,
                batch=torch.arange(self.microbatches),
                **rows,
            )
            left = len(self.depot.tensors) + len(self.depot.gradients)
        finally:
            self.depot.clear()
        if left:
            raise RuntimeError(f"{left} tensors were left in the depot of rank {self.rank}: a schedule skipped a stage")
        if out is not None and kept is not None:
            kept.append(out)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        total = total.double()
        dist.all_reduce(total, group=self.group)
        return total

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of one micro-batch, so that the losses of a step add up to the mean over its tokens."""
        return token_loss(logits, targets) * (targets != IGNORED).sum() / self._count

    def _settle(self) -> None:
        """Dense gradients, summed over the stages that share a parameter and averaged over replicas."""
        for name in sorted(self._held):  # one order on all ranks
            first, *copies = self._held[name]
            if not isinstance(first, nn.Parameter):
                continue
            for copy in copies:
                if copy.grad is not None:
                    first.grad = copy.grad if first.grad is None else first.grad + copy.grad
                    copy.grad = None
            group = self._shared.get(name)
            if group is not None or self._replicas is not None:
                first.grad = torch.zeros_like(first) if first.grad is None else first.grad
            if first.grad is None:
                continue
            # a zero-bubble schedule leaves views, and a fused optimizer reads a view as if it were dense
            first.grad = first.grad.contiguous()
            local = first.grad.to_local() if isinstance(first.grad, DTensor) else first.grad
            if group is not None:
                dist.all_reduce(local, group=group)
            if self._replicas is not None:
                dist.all_reduce(local, group=self._replicas)
                local /= dist.get_world_size(self._replicas)

    @torch.no_grad()
    def _refresh(self) -> None:
        """A parameter of two sharded stages of a rank is there twice: the second follows the first."""
        for first, *copies in self._held.values():
            for copy in copies:
                copy.copy_(first)

    def _allocate(self) -> dict[str, list[Tensor]]:
        """Memory for the tensors of this rank. One that two of its stages use is one tensor, unless it is sharded."""
        held: dict[str, list[Tensor]] = {}
        for piece in self.slices.values():
            piece.to_empty(device=self.device)
            for name, part, key, tensor in list(tensors_of(piece.net)):
                there = held.setdefault(name, [])
                if there and not isinstance(tensor, DTensor):
                    where: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
                    where[key] = there[0]
                else:
                    there.append(tensor)
        return held

    def _ranks(self, name: str) -> list[int]:
        """Of the pipeline, that hold a tensor."""
        blocks = self.cuts.users[name]
        return sorted({route.rank for route in self.plan if not blocks.isdisjoint(route.layers)})

    def _groups(self) -> dict[str, dist.ProcessGroup]:
        """For every parameter of this rank that other ranks hold too, those who add up its gradients."""
        everyone = dist.get_process_group_ranks(self.group)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(len(everyone))): self.group}
        shared = {name: tuple(self._ranks(name)) for name in sorted(self._held)}
        found = {}
        for ranks in sorted({ranks for ranks in shared.values() if len(ranks) > 1} - made.keys()):
            made[ranks] = dist.new_group([everyone[rank] for rank in ranks], use_local_synchronization=True)
        for name, ranks in shared.items():
            if len(ranks) > 1:
                found[name] = made[ranks]
        return found

    def _stage(self, route: Route, stages: int) -> PipelineStage:
        """Types and shapes are given: what torch would infer them with is a real pass, whose gradients stay behind."""
        rows, like = self.rows // self.microbatches, self.cuts.like
        with torch.device("meta"):
            ids = torch.empty(rows, self.tokens, dtype=torch.long)
            dtype = self.slices[route.stage].net.embed.weight.dtype
            logits = torch.empty(rows, self.tokens, self.config.vocab, dtype=dtype, requires_grad=True)
        return PipelineStage(
            self.slices[route.stage],
            route.stage,
            stages,
            self.device,
            input_args=tuple(like[label] for label in route.inbox) if route.stage else (ids,),
            output_args=tuple(like[label] for label in route.outbox) if route.outbox else (logits,),
            group=self.group,
        )

    def _check_units(self, piece: Slice) -> None:
        units = sum(isinstance(module, FSDPModule) for module in piece.modules())
        if units and not isinstance(piece, FSDPModule):
            raise ValueError("a sharded stage must be an FSDP unit itself: torch reduces its gradients through it")
        if self.split and units > 1:
            raise ValueError(
                f"a zero-bubble schedule over {units} nested FSDP units leaves gradients out or wrong (torch 2.13); "
                "shard every stage as one unit, or use schedule=interleaved"
            )


def _on_meta(config: ModelConfig, dtype: torch.dtype, execution: Execution) -> Transformer:
    with unfilled():
        model = Transformer(config).to(dtype)
    model.execution = execution
    return model


def _with(model: Transformer, tensors: Mapping[str, Tensor]) -> Transformer:
    """A model that has these parameters and buffers, and no others."""
    for name, part, key, _ in list(tensors_of(strip(model, tensors))):
        where: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
        where[key] = tensors[name]
    return model


def _replicas(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    names = mesh.mesh_dim_names or ()
    return mesh["dp"].get_group() if "dp" in names and mesh["dp"].size() > 1 else None
