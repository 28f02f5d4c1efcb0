"""FSDP2 over a `Transformer`: a block and its part of the stream are one unit, and the rest is the root.

A design's parameters lie in the stream, under the names of the sites that use them, and `fully_shard` looks at the
children of a module. So a block adopts its parts while `fully_shard` looks at it: they are then gathered with the block
and freed with it, and keep their names. (In the root they would be whole during all of a forward pass; as a list,
`fully_shard([block, *parts])`, they would never be freed, because parts do not run.) What several blocks share, the
embedding, the head and its read are the root's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from residua.model.sublayers import Sublayer
from residua.model.transformer import Block, Transformer


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    cast_inputs: bool = False,
    reshard: bool | int = True,
    offload: bool = False,
) -> Transformer:
    """Shard a model in place (FSDP2) over a mesh of one axis, or of two (replicas of a sharded model, HSDP).

    dtype:   in which the matrices of blocks are gathered and multiplied, bfloat16 say; run it under autocast. Norms,
             what routes, the embedding and the head stay as they are stored, and gradients are summed in float32.
    cast_inputs: let FSDP cast what enters a block to `dtype`. It rounds the stream at every block; a float32 stream
             refuses it.
    reshard: free a block's parameters after its forward pass and gather them again for the backward one.
    offload: keep shards, their gradients and the optimizer state in host memory.

    Call it before the numbers exist (build on meta, then `materialise`) or after. Reads of several sites share no pass
    any more (`Execution.group` is 0): a block's queries are there only while the block runs.
    """
    if cast_inputs and (dtype is None or model.execution.dtype == torch.float32):
        raise ValueError(
            "cast_inputs rounds the stream at every block, and this one is float32; leave cast_inputs off and run "
            "under autocast, or give the stream the type of the blocks"
        )
    kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": kept}
    freed = {**how, "reshard_after_forward": reshard}
    parts, taken = parts_of(model), set[nn.Parameter]()
    for block, owned in zip(model.blocks, parts, strict=True):
        assert isinstance(block, Block)
        adopted = list(owned)
        if dtype is not None:
            adopted += narrow(block, dtype, cast_inputs=cast_inputs, **freed)
        block.adopted = nn.ModuleList(adopted)
        fully_shard(block, **freed)
        del block.adopted
        taken |= _parameters(owned)
    # the root is needed last and first: what it gathered stays until the backward pass has used it
    fully_shard(model, ignored_params=taken or None, reshard_after_forward=False, **how)
    model.execution = replace(model.execution, group=0)
    return model


def narrow(block: nn.Module, dtype: torch.dtype, *, cast_inputs: bool = False, **how: Any) -> list[nn.Module]:
    """Make what multiplies in a block a unit of its own, in `dtype`, and give the norms that were left out of it: they
    are called from outside, by the stream."""
    matrices: Any = list(block.sublayers)  # type: ignore[arg-type]
    norms = [norm for each in matrices for norm in _outside(each)]
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=cast_inputs)
    fully_shard(matrices, mp_policy=policy, ignored_params=_parameters(norms), **how)
    return norms


def parts_of(model: Transformer) -> list[list[nn.Module]]:
    """For every block, the modules of the stream that bear the name of one of its sites and serve no other block."""
    blocks: Any = model.blocks
    place = {id(block): index for index, block in enumerate(blocks)}
    owner = {site.name: place[id(block)] for block, sites in model.runs for site in sites}
    found: list[list[nn.Module]] = [[] for _ in blocks]
    for path, module in model.stream.named_modules():
        *above, name = path.split(".")
        if name in owner and not owner.keys() & set(above):
            found[owner[name]].append(module)
    users = Counter(parameter for parts in found for parameter in _parameters(parts))
    return [[part for part in parts if all(users[each] == 1 for each in part.parameters())] for parts in found]


def _outside(sublayer: nn.Module) -> list[nn.Module]:
    """The norms of a sublayer that are called before and after it, and not by it."""
    assert isinstance(sublayer, Sublayer)
    norms: list[nn.Module | None] = [sublayer.norm, sublayer.out_norm]
    return [norm for norm in norms if norm is not None and any(True for _ in norm.parameters())]


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}
