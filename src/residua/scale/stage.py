"""A pipeline stage's module: blocks of a model that take and give plain tuples of tensors.

`torch.distributed.pipelining` moves tuples of tensors between stages and knows nothing else of them. A `Slice` makes a
state of what arrives, runs its blocks, and gives the tensors of the next boundary. Under incremental transport a rank
keeps, in its `Depot`, what later stages of its own need: they take it from there, and leave its gradients there until
the backward pass of the stage where it came in or was made. Two autograd functions do that, one at each end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from residua.model.local import Started
from residua.model.transformer import Transformer, named_generator, start
from residua.runner import Flow, Runner
from residua.scale.cuts import Cuts, Route
from residua.scale.shard import narrow

Key = tuple[int, str]
"""A micro-batch and a label."""


@dataclass
class Depot:
    """What one rank keeps of the micro-batches in flight; empty between two steps."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Of kept tensors, until the stage asks that kept them."""

    def forget(self, number: int) -> None:
        """A micro-batch has passed the last stage of this rank."""
        for key in [key for key in self.tensors if key[0] == number]:
            del self.tensors[key]

    def clear(self) -> None:
        """After an error, or where gradients were never asked for."""
        self.tensors.clear()
        self.gradients.clear()


class _Keep(torch.autograd.Function):
    """`carrier`, an output of the stage; its backward pass also brings what later stages left for the kept tensors."""

    @staticmethod
    def forward(ctx: Any, depot: Depot, number: int, labels: tuple[str, ...], carrier: Tensor, *kept: Tensor) -> Tensor:
        ctx.where = depot, number, labels
        return carrier.clone()  # a view could not be detached in place, which zero-bubble schedules do

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        depot, number, labels = ctx.where
        return None, None, None, *gradients, *(depot.gradients.pop((number, label), None) for label in labels)


class _Take(torch.autograd.Function):
    """Kept tensors as inputs of a stage. `anchor`, which was received, is what makes every kind of backward pass come
    by here, also one that asks for the gradients of received tensors alone."""

    @staticmethod
    def forward(ctx: Any, depot: Depot, number: int, labels: tuple[str, ...], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.where = depot, number, labels
        ctx.set_materialize_grads(False)
        return tuple(_alias(depot.tensors[number, label]) for label in labels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        depot, number, labels = ctx.where
        for label, gradient in zip(labels, gradients, strict=True):
            if gradient is not None:
                there = depot.gradients.get((number, label))
                depot.gradients[number, label] = gradient if there is None else there + gradient
        return None, None, None, None


def _alias(tensor: Tensor) -> Tensor:
    """The same memory under another tensor, which is no view."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _sendable(tensor: Tensor) -> Tensor:
    """Dense, and no view."""
    dense = tensor.contiguous()
    return dense.clone() if dense._is_view() else dense


class Slice(nn.Module):
    """The blocks of one stage, with the embedding or the head where they belong.

    `net` is the whole model by name and structure; all but this stage's tensors were taken from it by `strip`.
    """

    def __init__(
        self,
        net: Transformer,
        route: Route,
        cuts: Cuts,
        depot: Depot,
        tokens: int,
        *,
        checkpointed: bool = False,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()
        self.around = around
        self.net, self.route, self.cuts, self.depot = net, route, cuts, depot
        self.tokens, self.checkpointed = tokens, checkpointed
        self.first, self.last = route.layers.start == 0, route.layers.stop == net.plan.depth

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of this stage."""
        return [self.net.blocks[layer] for layer in self.route.layers]

    def forward(
        self, *received: Tensor, batch: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """batch: the number of the micro-batch. mask, documents: of its rows, as a Transformer takes them."""
        with self.around():
            return self._run(received, int(batch), mask, documents)

    def _run(
        self, received: tuple[Tensor, ...], number: int, mask: Tensor | None, documents: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        net, route = self.net, self.route
        runner = Runner(net.stream, net.execution, blockwise=True)
        ids = received[0]
        have: dict[str, Tensor] = {}
        if self.first:
            state = Runner.cut(runner.open(net.embed(ids), None, ids))
        else:
            ids = torch.empty(1, 1, dtype=torch.long, device=ids.device).expand(len(ids), self.tokens)
            have = self._arrived(received, number)
            state = self.cuts.at[route.layers.start].state(have)
        context = net.context(ids, mask, None, documents)
        for block in self.blocks:
            around = (runner, context)
            if self.checkpointed and torch.is_grad_enabled():
                state = checkpoint(block.alone, state, *around, use_reentrant=False)
            else:
                state = block.alone(state, *around)  # type: ignore[operator]
        if self.last:
            (x,) = runner.read(Flow(state), net.plan.head, net.norm).lanes
            self._forget(number)
            return net.logits(x)
        have |= self.cuts.at[route.layers.stop].tensors(state)
        sent = self._keep(have, [_sendable(have[label]) for label in route.outbox], number)
        self._forget(number)
        self._check(sent)
        return tuple(sent)

    def _arrived(self, received: tuple[Tensor, ...], number: int) -> dict[str, Tensor]:
        """What came from the stage before and what this rank had, by label."""
        route = self.route
        have = dict(zip(route.inbox, received, strict=True))
        learned = tuple(label for label in route.taken if self.cuts.like[label].requires_grad)
        have |= {label: self.depot.tensors[number, label] for label in route.taken if label not in learned}
        if learned:
            anchor = next(have[label] for label in route.inbox if self.cuts.like[label].requires_grad)
            have |= dict(zip(learned, _Take.apply(self.depot, number, learned, anchor), strict=True))
        return have

    def _keep(self, have: Mapping[str, Tensor], sent: list[Tensor], number: int) -> list[Tensor]:
        """Put aside what later stages of this rank need."""
        for label in self.route.kept:
            self.depot.tensors[number, label] = have[label].detach()
        labels = tuple(label for label in self.route.kept if have[label].requires_grad)
        if labels:
            at = next(at for at, tensor in enumerate(sent) if tensor.requires_grad)
            sent[at] = _Keep.apply(self.depot, number, labels, sent[at], *(have[label] for label in labels))
        return sent

    def _forget(self, number: int) -> None:
        if self.route.last_here:
            self.depot.forget(number)

    def _check(self, sent: Sequence[Tensor]) -> None:
        for label, tensor in zip(self.route.outbox, sent, strict=True):
            like = self.cuts.like[label]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                raise ValueError(
                    f"{label} leaves stage {self.route.stage} as {tensor.dtype} {tuple(tensor.shape)} and not as the "
                    f"{like.dtype} {tuple(like.shape)} that the next stage awaits; give the stream a type of its own "
                    "(Execution.dtype) where sublayers compute in another"
                )


def sharded(
    mesh: DeviceMesh, *, nested: bool = True, dtype: torch.dtype | None = None, **how: Any
) -> Callable[[Slice], None]:
    """A `shard` for pipelines: FSDP2 over a mesh, with every stage as a unit and, `nested`, every block of it too.

    Parameters of the design lie in the stage's own unit. Units are gathered once a step and not freed between the
    micro-batches, which would gather them again for each; gradients are scattered once, at the end.
    dtype: of `nested` blocks, in which their matrices are gathered and multiplied, as `residua.scale.shard` has it.
    how:   what `fully_shard` takes beside the mesh.
    """
    how = {"reshard_after_forward": False} | how

    def shard(piece: Slice) -> None:
        for block in piece.blocks if nested else ():
            if dtype is not None:
                narrow(block, dtype, mesh=mesh, **how)
            fully_shard(block, mesh=mesh, **how)
        fully_shard(piece, mesh=mesh, **how)

    return shard


def tensors_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every parameter and buffer: its name, the module that has it, its key there, and itself."""
    for path, part in module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{key}" if path else key, part, key, tensor


def strip(net: Transformer, held: Iterable[str]) -> Transformer:
    """The model with these parameters and buffers alone. The others stay as plain tensors on the meta device: whoever
    uses one of them after all gets an error and no wrong number."""
    held = set(held)
    for name, part, key, tensor in list(tensors_of(net)):
        if name not in held:
            part._parameters.pop(key, None)
            part._buffers.pop(key, None)
            part.__dict__[key] = tensor.detach()
    return net


@torch.no_grad()
def fill(template: Transformer, seed: int, holders: Mapping[str, Sequence[Tensor]]) -> None:
    """Put the numbers of `Transformer.initialise(seed)` into tensors, plain or sharded, by name.

    template: the whole model on the meta device, in the type that it would be initialised in. Each tensor is drawn
    whole and on the host, as in a model that is built there, and only what is held of it stays, so that no more than
    one module's own exists at a time.
    """
    names = {(part, key): name for name, part, key, _ in tensors_of(template)}
    stds = template.starts()
    for name, parameter in template.named_parameters():
        if name in stds and holders.get(name):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            start(whole, stds[name], seed, name)
            _put(holders[name], whole)
    for module in template.modules():
        if isinstance(module, Started):
            with _filled([module], names, holders):
                module.start()
    generator = named_generator(torch.empty(0), seed, "stream")
    for part in template.stream.modules():
        reset = getattr(part, "reset_parameters", None)
        if part is not template.stream and reset is not None:
            # in the order of `Stream.reset`, held here or not, because one generator serves them all
            with _filled([part], names, holders):
                reset(generator)


@contextmanager
def _filled(
    modules: Iterable[nn.Module],
    names: Mapping[tuple[nn.Module, str], str],
    holders: Mapping[str, Sequence[Tensor]],
) -> Iterator[None]:
    """Inside, the tensors of these modules have memory; afterwards their holders have the numbers."""
    before = [
        (module, where, key, tensor)
        for module in modules
        for where in (module._parameters, module._buffers)
        for key, tensor in where.items()
        if tensor is not None
    ]
    for _, where, key, tensor in before:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        where[key] = nn.Parameter(whole) if isinstance(tensor, nn.Parameter) else whole  # type: ignore[assignment]
    yield
    for module, where, key, tensor in before:
        made = where[key]
        assert made is not None  # it was given memory above
        _put(holders.get(names[module, key], ()), made.detach())
        where[key] = tensor  # type: ignore[assignment]


def _put(holders: Sequence[Tensor], whole: Tensor) -> None:
    for tensor in holders:
        if isinstance(tensor, DTensor):
            piece = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(piece.to_local())
        else:
            tensor.copy_(whole)
