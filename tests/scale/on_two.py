"""DDP and FSDP2 on two processes against one, for every design: see `test_sharded.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import residua
from residua.lab.train.optim import Optimizers
from residua.model import Transformer, token_loss
from residua.registry import design as class_of
from residua.runner import Execution
from residua.scale.layout import Parallel
from residua.scale.shard import shard
from residua.scale.start import materialise
from tests.scale.common import (
    RECIPE,
    STEPS,
    Story,
    alone,
    attempted,
    begin,
    built,
    described,
    end,
    furthest,
    gathered,
    pieces,
    whole,
)

LAYOUT = "swa:position=bias:window=3,attn:local=conv,mlp"


def run(net: Any, *, steps: int = STEPS, parts: int = 1, checkpointed: bool = False) -> Story:
    """Updates of a model that is spread over the processes."""
    story, optimizers = Story(), Optimizers(RECIPE, getattr(net, "module", net))
    for step in range(steps):
        inputs, targets = list(pieces(step, ranks))[rank]
        total, logits = torch.zeros((), dtype=torch.float64), []
        turns = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        for turn, (some, wanted) in enumerate(turns):
            last = turn == len(turns) - 1
            if not isinstance(net, DistributedDataParallel):
                net.set_requires_gradient_sync(last)
            with nullcontext() if last or not isinstance(net, DistributedDataParallel) else net.no_sync():
                logits.append(net(some, checkpointed=checkpointed))
                part = token_loss(logits[-1], wanted) / parts
                part.backward()
            total += part.detach().double() / ranks
        dist.all_reduce(total)
        if step == 0:
            story.logits = gathered(torch.cat(logits))
            story.take(net)
        story.losses.append(float(total))
        optimizers.step(1.0)
    return story


def sharded(net: Transformer) -> Transformer:
    return shard(net, mesh)


def judged(design: str, right: Story, spread: Callable[[Transformer], Any], **how: Any) -> dict[str, Any]:
    story = run(spread(built(design)), **how)
    return story.off(right) | {"losses": story.losses[:4]}


def laws(design: str) -> dict[str, Any]:
    right = alone(design)
    found: dict[str, Any] = {}
    for label, steps, how in (
        ("plain", STEPS, {}),
        ("accumulate", 2, {"parts": 2}),
        ("checkpointed", 2, {"checkpointed": True}),
    ):
        found[f"ddp {label}"] = attempted(judged, design, right, DistributedDataParallel, steps=steps, **how)
        found[f"fsdp {label}"] = attempted(judged, design, right, sharded, steps=steps, **how)
    found["one process, two parts"] = alone(design, steps=4, parts=2).losses
    return found


def same_start(design: str, **other: Any) -> dict[str, Any]:
    """Names whose numbers are not those of the whole model, when built on meta, sharded and filled."""
    config = described(design, **other)
    with torch.device("meta"):
        net = Transformer(config)
    shard(net, mesh)
    held = sum(parameter.to_local().numel() for parameter in net.parameters())
    materialise(net, 7)
    right = dict(Transformer(config, seed=7).named_parameters())
    got = {name: whole(parameter.detach()) for name, parameter in net.named_parameters()}
    return {
        "differing": sorted(set(right) ^ set(got)) + [n for n in right if not torch.equal(got[n], right[n])],
        "share": held / sum(parameter.numel() for parameter in right.values()),
    }


def one_step(spec: str, **other: Any) -> dict[str, Any]:
    """A design with options: logits and gradients of one step."""
    return run(shard(built(spec, **other), mesh), steps=1).off(alone(spec, steps=1, **other))


def both(spec: str, **other: Any) -> dict[str, Any]:
    return one_step(spec, **other) | same_start(spec, **other)


def counted(counter: CommDebugMode) -> dict[str, int]:
    return {str(name).rpartition(".")[2]: count for name, count in counter.get_comm_counts().items()}


def collectives() -> dict[str, Any]:
    """Gathers and scatters of a step, and how many blocks are whole in the last block's forward pass."""
    net = shard(built("attnres", depth=6), mesh)
    blocks: Any = net.blocks
    seen: list[int] = []
    inputs, targets = list(pieces(0, ranks))[rank]
    token_loss(net(inputs), targets).backward()
    blocks[-1].sublayers[-1].register_forward_hook(
        lambda *_: seen.append(
            sum(any(g.is_unsharded for g in fully_shard.state(b)._fsdp_param_groups) for b in blocks)
        )
    )
    with CommDebugMode() as counter:
        loss = token_loss(net(inputs), targets)
        forward = counted(counter)
        loss.backward()
    root = {n for n, _ in net.named_parameters()} - {
        f"stream.at.{site.name}.{n}"
        for site in net.plan.sites
        for n, _ in (net.stream.part(site).named_parameters() if net.stream.part(site) is not None else ())
    }
    return {
        "forward": forward,
        "all": counted(counter),
        "whole": seen[0],
        "stream in root": sorted(n for n in root if n.startswith("stream.")),
    }


def mixed(design: str, wide: bool) -> dict[str, Any]:
    """bfloat16 matrices: what routes stays float32; gradients against those of one process under autocast."""
    execution = Execution(torch.float32, autocast=False) if wide else Execution(torch.bfloat16)

    def first(net: Transformer, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Story:
        story = Story()
        for some, wanted in parts:
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(some)
            (token_loss(logits, wanted) / (len(parts))).backward()
        story.take(net)
        return story

    one = built(design, torch.float32)
    one.execution = replace(execution, group=0)
    terms: dict[str, float] = {}
    for part in pieces(0, ranks):
        for name, each in first(one, [part]).gradients.items():
            terms[name] = terms.get(name, 0.0) + float(each.abs().max()) / ranks
        one.zero_grad()
    right = first(one, list(pieces(0, ranks)))
    net = built(design, torch.float32)
    net.execution = execution
    shard(net, mesh, dtype=torch.bfloat16)
    types: dict[str, set[str]] = {"stream": set(), "norm": set(), "matrix": set(), "state": set()}
    mine: Any = net.blocks[1]

    def look(module: Any, inputs: Any, output: Any) -> None:
        for part in (net.stream.part(site) for site in mine.sites):
            types["stream"] |= {str(p.dtype) for p in (part.parameters() if part is not None else ())}
        types["norm"] |= {str(p.dtype) for each in mine.sublayers for p in each.norm.parameters()}
        types["state"] |= {str(leaf.dtype) for leaf in torch.utils._pytree.tree_leaves(output)}

    mine.register_forward_hook(look)
    down = mine.sublayers[-1].down
    down.register_forward_hook(lambda module, *_: types["matrix"].add(str(module.weight.dtype)))
    story = first(net, [list(pieces(0, ranks))[rank]])
    where, gap = furthest(story.gradients, right.gradients, terms)
    return {"gradient": gap, "where": where, **{kind: sorted(each) for kind, each in types.items()}}


def refused() -> str:
    net = built("attnres", torch.float32)
    net.execution = Execution(torch.float32, autocast=False)
    try:
        shard(net, mesh, dtype=torch.bfloat16, cast_inputs=True)
    except ValueError as error:
        return str(error)
    return ""


def offloaded() -> dict[str, Any]:
    return run(shard(built("delta"), mesh, offload=True), steps=3).off(alone("delta", steps=3))


rank, ranks = begin()
mesh = Parallel(fsdp=ranks).mesh()["fsdp"]
torch.use_deterministic_algorithms(True)
end(
    {
        "laws": {design: laws(design) for design in residua.names()},
        "options": {
            f"{name}:{case}": attempted(one_step, f"{name}:{case}", depth=2)
            for name in residua.names()
            for case in class_of(name).cases
            if case  # the others are among the laws
        },
        "start": {design: attempted(same_start, design) for design in residua.names()},
        "start of layouts": attempted(same_start, "mudd", tied=False, layout=LAYOUT),
        "loops": {
            layout: attempted(both, "attnres", layout=layout)
            for layout in ("attn,mlp,loop:passes=2:blocks=1..2", "attn,mlp,loop:passes=2:stream=shared")
        },
        "value": {form: attempted(both, f"delta:value={form}") for form in ("resformer", "learned", "table", "mixed")},
        "collectives": attempted(collectives),
        "mixed": {
            f"{design} {'float32' if wide else 'bfloat16'}": attempted(mixed, design, wide)
            for design in residua.names()
            for wide in (False, True)
        },
        "refused": refused(),
        "offload": attempted(offloaded),
    }
)
