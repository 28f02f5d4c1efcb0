"""DeepCrossAttention: queries, keys and values each read their own mixture of all earlier block outputs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Routing, Start
from residua.streams._layered import Layered, LayeredStream
from residua.streams._parts import Part, block_names, constant, positive


class GRN(Part):
    """A generalised residual: b per source (v1) or per source and channel (v2), plus relu(w . f_j) (v3)."""

    bias: Tensor
    gate: Tensor  # of v3

    def __init__(self, version: str, width: int, sources: int) -> None:
        super().__init__()
        self.add("bias", (sources,) if version == "v1" else (sources, width), constant(1.0))
        if version == "v3":
            self.add("gate", (width,), constant(0.0))

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        mixed = ops.mix(self.bias, sources)
        return mixed if not hasattr(self, "gate") else mixed + ops.mix(self.opened(sources), sources)

    def opened(self, sources: tuple[Tensor, ...]) -> Tensor:
        """relu(w . f_j) as [n b t].

        Written as a clamp, whose slope at 0 is 1: with w = 0 every product is exactly 0, where PyTorch's relu has
        slope 0, and the gate would never learn.
        """
        wide = accumulator(sources[0].dtype)
        return torch.stack([(source.to(wide) @ self.gate.to(wide)).clamp_min(0) for source in sources])

    def weights(self, sources: tuple[Tensor, ...]) -> Tensor:
        """The weight of every source as [n b t group]."""
        rows, tokens = sources[0].shape[:2]
        bias = self.bias if self.bias.ndim == 2 else self.bias[:, None]
        weights = bias[:, None, None, :].expand(-1, rows, tokens, -1)
        return weights + self.opened(sources)[..., None] if hasattr(self, "gate") else weights


@register("dca")
class DCA(LayeredStream):
    """g = sum_j (b_j + relu(w . f_j)) f_j, one each for q, k and v, over block deltas f = [e, f_1, ...].

    A block's output is the delta a + y: what it read is not added. The sublayers after the attention read
    q_in + a (the paper shows this residual in a figure only). b = 1 and w = 0 give the sum: the standard network.

    grn     v1: a scalar per source; v2: a scalar per source and channel; v3: v2 with the input-dependent gate.
    lanes   three: q, k and v mix apart where a block opens with attention; one: they share.
    window  k-DCA: the model input, the last `window` deltas, and the *sum* of those in between, which keeps the
            design equal to the standard network at the start; ports that drop the middle are not.

    In v1 the first block has one scalar over its single source, and not three: a norm follows, so that it matters
    through the residual alone.
    """

    paper = "arXiv 2502.06785"
    mixes = "block deltas"
    starts: Start = "standard"
    cases = ("", "grn=v1", "grn=v2", "lanes=one", "window=1", "window=2,grn=v1")

    def __init__(
        self,
        plan: Plan,
        *,
        grn: Literal["v1", "v2", "v3"] = "v3",
        lanes: Literal["three", "one"] = "three",
        window: int | None = None,
    ) -> None:
        super().__init__(plan)
        self.three, self.window = lanes == "three", window
        positive(self.name, window=1 if window is None else window)

        def make(site: Site) -> nn.ModuleList | None:
            if not site.first:
                return None
            count = len(self._names(site))
            lanes = 3 if self.three and site.lanes == 3 and not (grn == "v1" and count == 1) else 1
            return nn.ModuleList(GRN(grn, plan.width, count) for _ in range(lanes))

        self.each(make)

    def feeds(self, site: Site) -> int:
        part = self.part(site)
        return 1 if part is None else len(part)

    def mixed(self, sources: tuple[Tensor, ...], site: Site) -> tuple[Tensor, ...]:
        part = self.part(site)
        return sources if part is None else tuple(grn(sources) for grn in part)

    def kept(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.window is None or len(sources) <= self.window + 2:
            return sources
        embed, middle, evicted, *recent = sources
        return (embed, middle + evicted, *recent)

    def sources(self, site: Site) -> tuple[str, ...]:
        return () if self.part(site) is None else self._names(site)

    def routing(self, s: Layered, site: Site) -> Routing | None:
        part = self.part(site)
        if part is None:
            return None
        return Routing(s.sources, torch.stack([grn.weights(s.sources) for grn in part]))

    def _names(self, site: Site) -> tuple[str, ...]:
        embed, *deltas = block_names(self.plan, site.layer)
        if self.window is None or len(deltas) <= self.window:
            return (embed, *deltas)
        return (embed, "middle", *deltas[-self.window :])
