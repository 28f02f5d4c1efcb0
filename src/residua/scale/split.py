"""Tensor and sequence parallelism: matrices are split over ranks, and the stream over tokens.

A depth read mixes the layers of one token. So a rank that has some of the tokens reads, mixes and writes them alone,
with kernels that see plain tensors: between sublayers nothing crosses ranks. A sublayer gathers the tokens of its
inputs, computes its share of heads or channels, and scatters the sum of what all ranks computed (gather and scatter
once a lane and once an output). FSDP may shard the pieces further (`shard`, afterwards, over another axis). What every
rank holds whole, gains and the design's parameters, gets gradients of the rank's own tokens; `settle` adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from residua.model.sublayers import MLP, Heads, Sublayer
from residua.model.transformer import Transformer
from residua.stream import Stream

COLUMNS = {Heads: ("q", "k", "v"), MLP: ("gate", "up")}
ROWS = {Heads: "o", MLP: "down"}


def split(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Split a model in place over a mesh of one axis; the ranks of it are then given the same rows.

    Logits are gathered on every rank. Call `settle` after every backward pass.

    Raises ValueError for what cannot be split: a design that mixes tokens, heads that the ranks do not divide, ...
    """
    refuse(model, mesh.size())
    for sublayer in model.sublayers():
        kind = Heads if isinstance(sublayer, Heads) else MLP
        columns = [name for name in COLUMNS[kind] if getattr(sublayer, name) is not None]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan[ROWS[kind]] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(sublayer, mesh, plan)
        lanes = model.stream.feeds(sublayer.site)
        parallelize_module(
            sublayer, mesh,
            PrepareModuleInput(
                input_layouts=(Shard(1),) * lanes, desired_input_layouts=(Replicate(),) * lanes, use_local_output=True
            ),
        )  # fmt: skip
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "unembed": PrepareModuleInputOutput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_input=False,
            output_layouts=(Shard(-1),), desired_output_layouts=(Replicate(),), use_local_output=True,
        ),
    }  # fmt: skip
    if model.head is not None:
        ends["head"] = ColwiseParallel()
    parallelize_module(model, mesh, ends)
    return model


def settle(model: nn.Module, mesh: DeviceMesh, copies: DeviceMesh | None = None) -> None:
    """After a backward pass: add up, over the ranks of a split, the gradients of what each of them holds whole (of a
    model that is sharded too: the same piece of); then average all gradients over the copies of the model, where there
    are several and FSDP does not see to it."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    _reduce([_local(each) for each in gradients if not _split_over(each, mesh)], mesh)
    if copies is not None and copies.size() > 1:
        _reduce([_local(each) for each in gradients], copies, copies.size())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_over(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh of one axis have pieces of a tensor that differ."""
    if not isinstance(tensor, DTensor):
        return False
    names, axes = mesh.mesh_dim_names, tensor.device_mesh.mesh_dim_names
    return names is None or axes is None or names[0] in axes


def _reduce(gradients: list[Tensor], mesh: DeviceMesh, over: int = 1) -> None:
    """Sum tensors in place over a mesh in one collective, divided by `over`."""
    if not gradients:
        return
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    for each, summed in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        each.copy_((summed / over if over > 1 else summed).view_as(each))


def refuse(model: Transformer, ranks: int) -> None:
    """Say what cannot be split, in one error."""
    wrong = [*_of_the_design(model.stream), *(said for each in model.sublayers() for said in _of_a(each, ranks))]
    if wrong:
        raise ValueError(f"tp={ranks}: {'; '.join(dict.fromkeys(wrong))}")


def _of_the_design(stream: Stream) -> list[str]:
    wrong = []
    if stream.mixes_tokens:
        wrong.append(f"{stream.spec} mixes tokens in its stream, and a rank would miss its neighbour's")
    if stream.sided:
        wrong.append(f"{stream.spec} shares values of attention, which are split over heads and not over tokens")
    if stream.takes_ids and not stream.sided:
        wrong.append(f"{stream.spec} looks up token ids, and a rank's tokens are not those of its ids")
    return wrong


def _of_a(sublayer: Sublayer, ranks: int) -> list[str]:
    name = sublayer.site.name
    if not isinstance(sublayer, Heads | MLP):
        return [f"{name}: a {sublayer.site.kind} sublayer mixes neighbouring tokens and is not split"]
    if isinstance(sublayer, MLP):
        wide = sublayer.gate.out_features
        return [] if wide % ranks == 0 else [f"{name}: its {wide} channels do not split over {ranks} ranks"]
    extra = [
        own for own, module in sublayer.named_children() if own not in _SPLIT and any(True for _ in module.parameters())
    ]
    if extra:
        return [f"{name}: its {', '.join(extra)} have parameters a head, which are not split"]
    heads, kept = (each.out_features // sublayer.head_width for each in (sublayer.q, sublayer.k))
    return [f"{name}: {heads} heads and {kept} key heads do not split"] if heads % ranks or kept % ranks else []


_SPLIT = ("q", "k", "v", "o", "norm", "out_norm", "q_norm", "k_norm", "v_norm")
"""What attention may hold: projections, which are split, and gains, which serve every head alike."""
