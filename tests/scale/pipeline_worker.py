"""What the tests of the pipeline run on several processes: `pipeline_worker.py OUT JOBS` under torchrun, both JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from residua.model import ModelConfig, Transformer, token_loss
from residua.runner import Execution
from residua.scale.cuts import Cuts
from residua.scale.pipeline import Pipeline
from residua.scale.stage import sharded
from tests.scale import pipeline_faults as faults
from tests.scale.common import from_first

VOCAB, ROWS, TOKENS, MICRO, DEPTH, STEPS = 32, 8, 8, 4, 4, 3
LONG = 20
"""Updates of a `long` job, with the rate of the other laws: a larger one makes more of a last bit in as many steps."""
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "fused": True}
"""A large eps: where a gradient is the rounding of zero, a small one makes steps of its sign."""


def adam(steps: int) -> dict[str, Any]:
    return ADAM if steps == STEPS else ADAM | {"lr": 1e-3}


def config(design: str, **changes: Any) -> ModelConfig:
    shape = {"vocab": VOCAB, "width": 16, "depth": DEPTH, "heads": 2, "mlp_width": 24, "init_std": 0.3, "eps": 1e-12}
    return ModelConfig(**(shape | {"design": design} | changes))


def batch(step: int, rows: int = ROWS, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (rows, tokens + 1), generator=torch.Generator().manual_seed(1000 + step))
    targets = ids[:, 1:].clone()
    targets[0, : step % STEPS + 2] = -100  # micro-batches count different numbers of tokens
    return ids[:, :-1].contiguous(), targets


class Alone:
    """One process: the loss, gradients and logits of the first step, and parameters after the last."""

    def __init__(self, chosen: ModelConfig, rows: int = ROWS, steps: int = STEPS, **given: Tensor) -> None:
        model = Transformer(chosen, seed=3)
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.double()
        optimizer = torch.optim.AdamW(model.parameters(), **adam(steps))
        self.losses = []
        for step in range(steps):
            inputs, targets = batch(step, rows)
            logits = model(inputs, **given)
            loss = token_loss(logits, targets)
            loss.backward()
            self.losses.append(float(loss.detach()))
            if not step:
                self.logits = logits.detach()
                self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                self.norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            self.evaluated = float(token_loss(model(inputs, **given), targets))
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}


HELD: dict[str, Alone] = {}
CUTS: dict[str, Cuts] = {}


def cuts_once(made: Any = Cuts.of) -> None:
    """Walk a model on the meta device once for all schedules: that takes as long as its steps."""

    def of(model: Transformer, rows: int, tokens: int) -> Cuts:
        key = f"{model.config} {model.embed.weight.dtype} {model.execution.dtype} {rows} {tokens}"
        if key not in CUTS:
            CUTS[key] = made(model, rows, tokens)
        return CUTS[key]

    Cuts.of = of  # type: ignore[method-assign, assignment]


def by_one(chosen: ModelConfig, rows: int, steps: int, **given: Tensor) -> Alone:
    """What one process finds: rank 0 makes it for all, once for all schedules."""
    key = f"{chosen} {rows} {steps} {sorted(given)}"
    if key not in HELD:
        HELD[key] = from_first(lambda: Alone(chosen, rows, steps, **given))
    return HELD[key]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The worst relative error of what this rank has; gradients that should be zero are noise of the largest."""
    floor = 1e-5 * max(float(one.abs().max()) for one in wanted.values())
    return max(
        float((found[name] - wanted[name]).abs().max() / max(float(wanted[name].abs().max()), floor)) for name in found
    )


def everywhere(value: Any) -> list[Any]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def counted(pipeline: Pipeline) -> Counter[tuple[str, int]]:
    """Bytes that the stages of this rank hand to torch for sending."""
    sent: Counter[tuple[str, int]] = Counter()
    stages = getattr(pipeline.engine, "_stages", None) or [pipeline.engine._stage]
    for stage in stages:
        for way in ("fwd", "bwd"):
            made = getattr(stage, f"get_{way}_send_ops")

            def noted(chunk: int, made: Any = made, key: tuple[str, int] = (way, stage.stage_index)) -> Any:
                ops = made(chunk)
                sent[key] += sum(op.tensor.nbytes for op in ops)
                return ops

            setattr(stage, f"get_{way}_send_ops", noted)
    return sent


def compare(
    chosen: ModelConfig,
    mesh: DeviceMesh,
    rows: int = ROWS,
    given: dict[str, Tensor] | None = None,
    steps: int = STEPS,
    **how: Any,
) -> dict[str, Any]:
    """Steps of a pipeline against one process; every number is the worst of all ranks."""
    names = mesh.mesh_dim_names or ()
    axis = next((name for name in ("dp", "fsdp") if name in names), None)
    replicas, place = (mesh[axis].size(), mesh[axis].get_local_rank()) if axis else (1, 0)
    given = given or {}
    alone = by_one(chosen, rows, steps, **given)
    pipeline = Pipeline(
        chosen, mesh, rows=rows // replicas, tokens=TOKENS, microbatches=MICRO, seed=3, dtype=torch.float64, **how
    )
    sent = counted(pipeline)
    held = dict(pipeline.named_parameters())
    bits = all(torch.equal(whole(p.detach()), alone.start[name].double()) for name, p in held.items())
    logits = pipeline.logits(batch(0, rows)[0].chunk(replicas)[place], **given)
    assert not sum(size for (way, _), size in sent.items() if way == "bwd")
    sent.clear()
    optimizer = torch.optim.AdamW(pipeline.parameters(), **adam(steps))
    losses, first = [], {}
    for step in range(steps):
        inputs, targets = batch(step, rows)
        count = (targets != -100).sum() / replicas
        own = [part.chunk(replicas)[place] for part in (inputs, targets)]
        losses.append(float(pipeline.step(*own, count=count, **given)))
        if not step:
            first = {name: whole(p.grad).clone() for name, p in held.items()}
            bytes_sent, norm = dict(sent), float(pipeline.gradient_norm())
        optimizer.step()
        optimizer.zero_grad()
    evaluated = float(pipeline.evaluate(*own, count=count, **given))
    means = torch.tensor(everywhere([*losses, evaluated, norm]), dtype=torch.float64).mean(
        0
    )  # of replicas, which have their own rows
    wanted = torch.tensor([*alone.losses, alone.evaluated, alone.norm], dtype=torch.float64)
    predicted = {}
    for link in pipeline.links:
        predicted["fwd", link.stage] = MICRO * link.forward
        predicted["bwd", link.stage + 1] = MICRO * link.backward
    found = {
        "bits": bits,
        "outputs": 0.0 if logits is None else float((logits - alone.logits.chunk(replicas)[place]).abs().max()),
        "losses": float((means - wanted).abs().max()),
        "gradients": gap(first, alone.gradients),
        "parameters": gap({name: whole(p.detach()) for name, p in held.items()}, alone.parameters),
        "bytes": all(size == predicted.get(key, 0) for key, size in bytes_sent.items()),
        "kept": len(pipeline.depot.tensors) + len(pipeline.depot.gradients),
    }
    ranks = everywhere((found, sorted(held), sum(bytes_sent.values())))
    missing = set(alone.parameters) - {name for _, names, _ in ranks for name in names}
    result = {
        key: min(one[0][key] for one in ranks) if key in ("bits", "bytes") else max(one[0][key] for one in ranks)
        for key in found
    }
    return result | {"missing": sorted(missing), "sent": sum(one[2] for one in ranks) // replicas}


def narrow(design: str, mesh: DeviceMesh, schedule: str) -> dict[str, Any]:
    """bfloat16 autocast around a float32 stream: the worst gradient against one process with the same micro-batches."""
    execution = Execution(torch.float32, autocast=False)
    model = Transformer(config(design), seed=3)
    model.execution = execution
    pipeline = Pipeline(
        config(design),
        mesh,
        schedule=schedule,
        rows=ROWS,
        tokens=TOKENS,
        microbatches=MICRO,
        seed=3,
        execution=execution,
    )
    inputs, targets = batch(0)
    count = (targets != -100).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipeline.step(inputs, targets)
        for one, other in zip(inputs.chunk(MICRO), targets.chunk(MICRO), strict=True):
            (token_loss(model(one), other) * (other != -100).sum() / count).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    worst = everywhere(gap({name: p.grad for name, p in pipeline.named_parameters()}, wanted))
    return {"gradients": max(worst), "loss": float(loss), "types": sorted({str(one.dtype) for one in wanted.values()})}


def attempt(job: str) -> dict[str, Any]:
    """`SCHEDULE/WORD/... DESIGN`."""
    how, _, design = job.partition(" ")
    schedule, *words = how.split("/")
    ranks, rows = dist.get_world_size(), ROWS
    if design == "torch":
        return faults.nested_units(schedule)
    if "autocast" in words:
        return narrow(design, init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",)), schedule)
    changes: dict[str, Any] = {"depth": 8} if "deep" in words else {}
    changes |= {"tied": False} if "untied" in words else {}
    options: dict[str, Any] = {
        "schedule": schedule,
        "incremental": "whole" not in words,
        "checkpointed": "checkpointed" in words,
        "execution": Execution(least=0) if "grouped" in words else None,
        "steps": LONG if "long" in words else STEPS,
    }
    if "documents" in words:
        options["given"] = {"documents": (torch.arange(TOKENS) >= torch.arange(ROWS)[:, None]).long()}
    if not {"dp", "fsdp", "units"} & set(words):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    else:
        name = "dp" if "dp" in words else "fsdp"
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", name))
        rows = 2 * ROWS
        options["shard"] = None if name == "dp" else sharded(mesh[name], nested="units" in words)
    if "inferred" in words:
        with faults.inferred_shapes():
            return compare(config(design, **changes), mesh, rows, **options)
    return compare(config(design, **changes), mesh, rows, **options)


def main() -> None:
    out, jobs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cuts_once()
    found: dict[str, Any] = {}
    for job in json.loads(Path(jobs).read_text()):
        began = time.perf_counter()
        try:
            found[job] = attempt(job)
        except Exception as error:
            cause = error.__cause__ or error
            found[job] = {"error": f"{type(cause).__name__}: {cause}"}
            if os.environ.get("SHOW"):
                traceback.print_exc()
        found[job]["seconds"] = time.perf_counter() - began
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found, indent=1))
        errors = everywhere(found[job].get("error"))
        if any(errors) and len(set(errors)) > 1:  # what all ranks refuse alike, before they talk, ends nothing
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
