"""Two axes at once on four processes: copies of a sharded model, and copies of a split one. See `test_four.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from residua.lab.diagnose import record_routing
from residua.lab.train import train
from residua.lab.train.optim import Optimizers
from residua.model import Transformer, token_loss
from residua.scale.layout import Parallel
from residua.scale.shard import shard
from residua.scale.split import settle, split
from residua.scale.start import materialise
from tests.scale.common import (
    DEEP,
    FOUR,
    RECIPE,
    Story,
    alone,
    attempted,
    batch,
    begin,
    built,
    described,
    end,
    in_float64,
    pieces,
    whole,
)
from tests.train.harness import toy_config, toy_tokens

DESIGNS = ("delta", "mudd", "mhc")
STEPS = 3


def run(design: str, layout: Parallel) -> dict[str, Any]:
    mesh, net = meshes[str(layout)], built(design, depth=2)
    if layout.tp > 1:
        split(net, mesh["tp"])
    if layout.fsdp > 1:
        shard(net, mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"])
    story, optimizers = Story(), Optimizers(RECIPE, net)
    for step in range(STEPS):
        inputs, targets = list(pieces(step, layout.copies))[layout.copy_of(rank)]
        logits = net(inputs)
        loss = token_loss(logits, targets)
        loss.backward()
        if layout.tp > 1:
            settle(net, mesh["tp"], None if layout.fsdp > 1 else mesh["dp"])
        total = loss.detach() / ranks  # ranks that split a copy have the same loss
        dist.all_reduce(total)
        if step == 0:
            every = [torch.empty_like(logits) for _ in range(ranks)]
            dist.all_gather(every, logits.detach().contiguous())
            story.logits = torch.cat(every[:: layout.tp])
            story.take(net)
        story.losses.append(float(total))
        optimizers.step(1.0)
    return story.off(alone(design, steps=STEPS, depth=2))


def started() -> list[str]:
    """Names whose numbers are not those of the whole model, when built on meta, split, sharded and filled."""
    mesh = meshes["fsdp=2,tp=2"]
    with torch.device("meta"):
        net = Transformer(described("mudd", depth=2))
    materialise(shard(split(net, mesh["tp"]), mesh["fsdp"]), 7)
    right = dict(Transformer(described("mudd", depth=2), seed=7).named_parameters())
    return [name for name, each in net.named_parameters() if not torch.equal(whole(each.detach()), right[name])]


def recorded(design: str) -> dict[str, Any]:
    """What a routing record of a sharded model says, beside that of the whole one."""
    found = []
    for net in (built(design, depth=2), shard(built(design, depth=2), meshes["dp=2,fsdp=2"]["dp", "fsdp"])):
        with torch.no_grad(), record_routing(net, weights=False, similarity=False) as record:
            net(batch(0)[0])
        found.append(record.summary()["network"])
    return {"whole": found[0], "sharded": found[1]}


def trained(names: Iterable[str]) -> None:
    with in_float64():
        for name in names:
            layout, pipes = FOUR[name]
            out = Path(sys.argv[1]).parent / name
            train(toy_config(**DEEP), out, tokens=toy_tokens(), parallel=layout, pipes=pipes)


layouts = (Parallel(dp=2, fsdp=2), Parallel(dp=2, tp=2), Parallel(fsdp=2, tp=2))
trained(map(str, layouts))
rank, ranks = begin()
meshes = {str(layout): layout.mesh() for layout in layouts}
end(
    {str(layout): {design: attempted(run, design, layout) for design in DESIGNS} for layout in layouts}
    | {"start": attempted(started)}
    | {"routing": {design: attempted(recorded, design) for design in DESIGNS[:2]}}
)
# last: DTensor remembers the groups of a mesh by name, and those of a mesh that was there before are gone
trained(name for name in FOUR if name.startswith("pp"))
