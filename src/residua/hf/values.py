"""v -> scale v + shift inside an attention of Hugging Face, for designs that share values (`value=...`).

A hook on the projection that makes the values is there for one call: what the design gives is mixed over tokens and
cached in their place, and what the projection made is handed back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from residua.hf.anatomy import Anatomy, Block, Config, Fused
from residua.plan import Plan


def projection_of(attention: nn.Module, anatomy: Anatomy | Block) -> nn.Module:
    """The module that makes the values."""
    projections = anatomy.projections
    assert projections is not None  # `check_values` has refused what has none
    return attention.get_submodule(projections.name if isinstance(projections, Fused) else projections[2])


def check_values(layer: nn.Module, block: Block, config: Config, plan: Plan, spec: str) -> None:
    """Refuse a layer whose attention makes other values than the plan says, or none."""
    heads, width = plan.kv
    if block.attention is None:
        raise ValueError(
            f"{spec} shares values of attention, and {type(layer).__name__} has no projection that makes them"
        )
    attention, fused = layer.get_submodule(block.attention.sublayer), _fused(block, config)
    if fused is not None:
        sizes, groups = fused
        made = sizes[2] * groups
    else:
        made = getattr(projection_of(attention, block), "out_features", heads * width)
    if made != heads * width:
        raise ValueError(
            f"{spec} shares values of {heads} heads of width {width}, and this attention makes {made} numbers"
        )


def _fused(anatomy: Anatomy | Block, config: Config) -> tuple[tuple[int, int, int], int] | None:
    """The layout of a fused projection."""
    return anatomy.projections.layout(config) if isinstance(anatomy.projections, Fused) else None


@contextmanager
def replaced(
    attention: nn.Module, anatomy: Anatomy | Block, config: Config, given: tuple[Tensor, ...], heads: int
) -> Iterator[list[Tensor]]:
    """Inside, attention mixes scale v + shift (or v, if nothing is given); the list is filled with v."""
    made: list[Tensor] = []
    fused = _fused(anatomy, config)

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        if fused is not None:
            sizes, groups = fused
            parts = output.unflatten(-1, (groups, sum(sizes)))
            rest, v = parts.split((sizes[0] + sizes[1], sizes[2]), -1)
            made.append(v.flatten(-2))
            if not given:
                return None
            return torch.cat([rest, mixed(made[0], given, heads).unflatten(-1, (groups, sizes[2]))], -1).flatten(-2)
        made.append(output)
        return mixed(output, given, heads) if given else None

    handle = projection_of(attention, anatomy).register_forward_hook(hook)
    try:
        yield made
    finally:
        handle.remove()


def mixed(v: Tensor, given: tuple[Tensor, ...], heads: int) -> Tensor:
    """scale v + shift, scale one number or one a head."""
    scale, shift = (each.to(v.dtype) for each in given)
    if shift.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"this design shares values of {shift.shape[-1]} numbers, and attention holds {v.shape[-1]} of them here; "
            "tensor parallelism splits its heads: use FSDP, or a design without value=..."
        )
    if scale.shape[-1] == 1:
        return scale * v + shift
    return (scale[..., None] * v.unflatten(-1, (heads, -1))).flatten(-2) + shift
