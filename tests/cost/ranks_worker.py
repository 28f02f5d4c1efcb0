"""What the test of `predict_ranks` measures on several processes: `ranks_worker.py OUT JOBS` under torchrun, both JSON.

A job is `PARALLEL SCHEDULE HOW DESIGN`, such as `pp=2,fsdp=2 interleaved units attnres`; HOW: nested `units` of FSDP in
a stage, `checkpointed`, `accumulated` micro-batches without stages, or `-`.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from residua import ops
from residua.model import ModelConfig, Transformer, token_loss
from residua.scale.layout import Parallel
from residua.scale.pipeline import SCHEDULES, Pipeline
from residua.scale.stage import sharded

ROWS, TOKENS, MICRO, ACCUMULATED = 16, 64, 4, 4
SHAPE = {"vocab": 96, "width": 64, "depth": 8, "heads": 4, "init_std": 0.3, "eps": 1e-12}


class Watch(TorchDispatchMode):
    """Bytes of every storage that operators made and that still lives, their most, and bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sent: Counter[str] = Counter()
        self._known: set[int] = set()

    def add(self, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                leaf = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._known and leaf.device.type == "cpu":
                    self._known.add(key)
                    size = storage.nbytes()
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            sizes = [leaf.nbytes for leaf in leaves]
            self.sent[name] += max(sizes, default=0) if "base" in name else sum(sizes)
        else:
            self.add((args, out))
        return out


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(SHAPE["vocab"], (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def measured(job: str) -> dict[str, Any]:
    """The second of two steps, when everything has its place."""
    layout, schedule, how, design = job.split()
    again = how == "checkpointed"
    parallel, watch = Parallel.parse(layout), Watch()
    mesh, chosen = parallel.mesh(), ModelConfig(**(SHAPE | {"design": design}))
    inputs, targets = batch()
    with ops.backend("reference"), watch:
        if parallel.pp > 1:
            shard = sharded(mesh["fsdp"], nested=how == "units") if parallel.fsdp > 1 else None
            run: Any = Pipeline(
                chosen, mesh, schedule=schedule, microbatches=MICRO, rows=ROWS, tokens=TOKENS, shard=shard,
                checkpointed=again,
            )  # fmt: skip
        else:
            run = Transformer(chosen)
            for block in run.blocks if parallel.fsdp > 1 else ():
                fully_shard(block, mesh=mesh["fsdp"])
            if parallel.fsdp > 1:
                fully_shard(run, mesh=mesh["fsdp"])
        optimizer = torch.optim.AdamW(run.parameters(), fused=True)
        for step in range(2):
            if step:
                watch.most, watch.sent = watch.now, Counter()
            if parallel.pp > 1:
                run.step(inputs, targets)
            else:
                parts = ACCUMULATED if how == "accumulated" else 1
                for turn, (some, wanted) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
                    run.set_requires_gradient_sync(turn == parts - 1)
                    token_loss(run(some, checkpointed=again), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"peak": watch.most, "sent": dict(watch.sent), "place": mesh["pp"].get_local_rank()}


def main() -> None:
    out, jobs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for job in json.loads(Path(jobs).read_text()):
        assert job.split()[1] in SCHEDULES
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, measured(job))
        found[job] = held
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
