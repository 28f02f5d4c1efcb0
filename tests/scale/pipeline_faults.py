"""Silent faults of torch 2.13 that the pipeline fences, reproduced: a test each says when one is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from residua.scale import pipeline
from residua.scale.pipeline import SCHEDULES


class Plain(nn.Module):
    """x + B tanh(A x)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.a, self.b = (
            nn.Parameter(torch.randn(8, 8, generator=generator, dtype=torch.float64) / 3) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.a) @ self.b


def error(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def nested_units(schedule: str) -> dict[str, Any]:
    """No residua: stages of two blocks on 2 x 2 processes, each block an FSDP unit, and then each stage one unit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(16, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    alone = nn.Sequential(*map(Plain, range(8)))
    error(alone(x), target).backward()
    found: dict[str, Any] = {}
    for nested in (True, False):
        stages = {
            s: nn.Sequential(Plain(2 * s), Plain(2 * s + 1)) for s in range(4) if s % 2 == mesh["pp"].get_local_rank()
        }
        for stage in stages.values():
            for block in stage if nested else ():
                fully_shard(block, mesh=mesh["fsdp"])
            fully_shard(stage, mesh=mesh["fsdp"])
        made = [
            PipelineStage(stage, at, 4, torch.device("cpu"), group=mesh["pp"].get_group())
            for at, stage in stages.items()
        ]
        engine = SCHEDULES[schedule].engine(made, 4, loss_fn=error)
        own = [part.chunk(2)[mesh["fsdp"].get_local_rank()] for part in (x, target)]
        engine.step(*(own[:1] if 0 in stages else ()), target=own[1] if 3 in stages else None, losses=[])
        wrong = 0
        for at, stage in stages.items():
            for place, block in enumerate(stage):
                for name, parameter in block.named_parameters():
                    wanted = dict(alone[2 * at + place].named_parameters())[name].grad
                    got = None if parameter.grad is None else parameter.grad.full_tensor()
                    wrong += got is None or not torch.allclose(got, wanted, rtol=1e-8)
        ranks = [0] * dist.get_world_size()
        dist.all_gather_object(ranks, wrong)
        found["nested" if nested else "one unit"] = sum(ranks)
    return found


@contextmanager
def inferred_shapes() -> Iterator[None]:
    """Pipelines whose stages are not told shapes and types, so that torch finds them with a pass of its own.

    That pass runs on memory that nobody filled; here it is NaN, so that what it leaves is no matter of luck.
    """
    told, filled = pipeline.PipelineStage, torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True

    def untold(*args: Any, input_args: object, output_args: object, **others: Any) -> PipelineStage:
        return told(*args, **others)

    pipeline.PipelineStage = untold  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        pipeline.PipelineStage = told  # type: ignore[misc]
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
