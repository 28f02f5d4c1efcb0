"""What every site of a model keeps for its backward pass, and its operations, from a walk without data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from residua import ops
from residua.counting.shapes import unfilled
from residua.counting.walk import Walk
from residua.lab.cost.accounted import Accounted
from residua.lab.cost.fused import fused
from residua.model.config import ModelConfig
from residua.model.transformer import Transformer
from residua.plan import Site
from residua.scale.cuts import Cuts, Route

PARTS = ("backbone", "stream")


class Bill:
    """The account of one micro-batch.

    checkpointed: a block keeps the state before it, and is run again for its backward pass.
    """

    def __init__(
        self, model: Transformer, walk: Walk, rows: int, tokens: int, loss: int, checkpointed: bool = False
    ) -> None:
        self.checkpointed = checkpointed
        self._walk, self._plan, self._last, self.loss = walk, model.plan, model.plan.depth - 1, loss
        self._stream = rows * tokens * model.config.width * model.embed.weight.dtype.itemsize
        outputs = [
            sum(one.out_features for one in block.modules() if isinstance(one, nn.Linear)) for block in model.blocks
        ]
        self._turned = [rows * tokens * each * model.embed.weight.dtype.itemsize for each in outputs]

    def _sites(self, layers: range) -> list[Site]:
        return [site for site in self._plan.readers if min(site.layer, self._last) in layers]

    def flops(self, layers: range) -> float:
        """Of a stage, forward."""
        return sum(self._walk.flops[f"{site.index} {part}"] for site in self._sites(layers) for part in PARTS)

    def kept(self, cuts: Cuts, route: Route, tp: int) -> dict[str, int]:
        """Bytes of a stage; tensor parallelism splits the tokens of the stream and the width of the sublayers."""
        sites = self._sites(route.layers)
        if not self.checkpointed:
            return {part: sum(self._saved(site, part) for site in sites) // tp for part in PARTS}
        head = [site for site in sites if site.kind == "head"]  # which is not run again
        found = {part: sum(self._saved(site, part) for site in head) for part in PARTS}
        # what was received lies in the buffers of the cut
        states = {label for layer in route.layers for label in cuts.at[layer].labels} - {*route.inbox}
        found["stream"] += cuts.nbytes(states)
        return {part: size // tp for part, size in found.items()}

    def most(self, layers: range, tp: int) -> int:
        """Bytes that a backward pass needs beside what is kept: gradients of the site that keeps most, and a block that
        is run again."""
        sizes = {site: sum(self._saved(site, part) for part in PARTS) for site in self._sites(layers)}
        if not self.checkpointed:
            return max(sizes.values()) // tp
        head = sum(size for site, size in sizes.items() if site.kind == "head")
        blocks = [[sizes[site] for site in sizes if site.layer == layer and site.kind != "head"] for layer in layers]
        # what the head kept is gone when the first block runs again
        return max(head, *(sum(block) + max(block) - head for block in blocks)) // tp

    def _saved(self, site: Site, part: str) -> int:
        return self._walk.saved[f"{site.index} {part}"]

    def turned(self, layers: range, tp: int) -> int:
        """Gradients that a zero-bubble schedule keeps of a stage between its two backward passes: one for the result of
        every product with a weight. (Those of a design are taken to be half of what it keeps.)"""
        return sum(self._turned[layer] for layer in layers) // tp

    def doors(self, mine: list[Route]) -> int:
        """Bytes that enter the sublayers of a rank: one stream each."""
        return self._stream * sum(len(self._plan.block(layer)) for route in mine for layer in route.layers)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        path: str,
        build: Callable[[ModelConfig], Transformer],
        checkpointed: bool = False,
    ) -> Bill:
        with unfilled():
            model = build(config).to(dtype)
        walk = Walk(model.parameters())
        ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
        with torch.enable_grad(), fused(walk) if path == "fused" else ops.backend("reference"), walk:
            with walk.inside("0 backbone"):
                steps = model.walk(ids, Accounted(model.stream, walk, by_site=True))
            for site in model.plan.readers:
                with walk.inside(f"{site.index} backbone"):
                    step = next(steps)
            with walk.inside(f"{model.plan.head.index} backbone"):
                logits = model.logits(step.read.lanes[0])
        # logits and their logarithms until the backward pass; there, one gradient of each
        loss = 2 * logits.nbytes + 2 * logits.numel() * max(4, dtype.itemsize)
        return cls(model, walk, rows, tokens, loss, checkpointed)
