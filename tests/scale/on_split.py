"""Tensor and sequence parallelism on two processes against one, for every design: see `test_split.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

import residua
from residua.lab.train.optim import Optimizers
from residua.model import Transformer, token_loss
from residua.registry import design as class_of
from residua.scale.layout import Parallel
from residua.scale.split import settle, split
from residua.scale.start import materialise
from tests.scale.common import RECIPE, STEPS, Story, alone, attempted, batch, begin, built, described, end, whole

SMALL = {"depth": 2}


def run(design: str, steps: int, **other: Any) -> dict[str, Any]:
    net, story = split(built(design, **other), mesh), Story()
    optimizers = Optimizers(RECIPE, net)
    for step in range(steps):
        inputs, targets = batch(step)
        logits = net(inputs)
        loss = token_loss(logits, targets)
        loss.backward()
        settle(net, mesh)
        if step == 0:
            story.logits = logits.detach()
            story.take(net)
        story.losses.append(float(loss.detach()))
        optimizers.step(1.0)
    return story.off(alone(design, steps=steps, **other))


def law(design: str) -> dict[str, Any]:
    return run(design, STEPS, **SMALL) | {"collectives": collectives(design), "start": start(design)}


def collectives(design: str) -> dict[str, Any]:
    """Of one forward pass, and how many lanes its sublayers read."""
    net = split(built(design, **SMALL), mesh)
    with CommDebugMode() as counter:
        net(batch(0)[0])
    lanes = sum(net.stream.feeds(site) for site in net.plan.sites)
    counts = {str(name).rpartition(".")[2]: count for name, count in counter.get_comm_counts().items()}
    return {"lanes": lanes, "sublayers": len(net.plan.sites), "counts": counts}


def start(design: str) -> list[str]:
    """Names whose numbers are not those of the whole model, when built on meta, split and filled."""
    with torch.device("meta"):
        net = Transformer(described(design, **SMALL))
    materialise(split(net, mesh), 7)
    right = dict(Transformer(described(design, **SMALL), seed=7).named_parameters())
    return [name for name, each in net.named_parameters() if not torch.equal(whole(each.detach()), right[name])]


def refused(**other: Any) -> str:
    try:
        split(built(**other), mesh)
    except ValueError as error:
        return str(error)
    return ""


rank, ranks = begin()
mesh = Parallel(tp=ranks).mesh()["tp"]
specs = {f"{name}:{case}" if case else name for name in residua.names() for case in class_of(name).cases}
mixing = sorted(spec for spec in specs if Transformer(described(spec, depth=4)).stream.mixes_tokens)
end(
    {
        "laws": {design: attempted(law, design) for design in residua.names()},
        "other": {
            label: attempted(run, "delta", 2, **other, **SMALL)
            for label, other in {
                "untied, key norms, shared keys": {"tied": False, "qk_norm": True, "kv_heads": 2},
                "windows and norms behind": {"layout": "swa:window=3,attn:norm=both,mlp:norm=reordered"},
                "loop": {"layout": "attn,mlp,loop:passes=2"},
            }.items()
        },
        "mixing": {spec: refused(design=spec, depth=4) for spec in mixing},
        "refused": {
            "values": refused(design="standard:value=resformer"),
            "taps": refused(design="standard", layout="conv,attn,mlp"),
            "local": refused(design="standard", layout="attn:local=conv,mlp"),
            "heads": refused(design="standard", heads=1, width=16),
        },
    }
)
