"""What a source is worth at a site: the change of the loss when the site reads without it.

    read_without_j = base + scale * sum_{n != j} weights[n] * values[n]

The other weights stay as they were: they are not renormalised, so the sum shows what this source contributed. Where
the design carries what the site read on as its shortcut (DenseFormer, ELC, Vertical, DCA, DepthSWA enter=stream), the
shortcut loses the source too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from residua.lab.diagnose.record import find_stream, logits_of
from residua.lab.diagnose.table import align
from residua.model import token_loss
from residua.plan import Site
from residua.runner import Observer, observed
from residua.stream import Stream


@dataclass(frozen=True, slots=True)
class Ablation:
    """The loss as it is, and its change without each source of each site: positive where the source helps."""

    design: str
    loss: float
    change: dict[str, dict[str, float]]
    """Site, then source."""

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"design": self.design, "loss": self.loss, "change": self.change}

    def _repr_html_(self) -> str:
        from residua.lab.diagnose.show import ablation_html

        return ablation_html(self.design, self.loss, self.change)

    def table(self) -> str:
        """A line for every site and source, the dearest first."""
        flat = [(site, source, gap) for site, sources in self.change.items() for source, gap in sources.items()]
        rows = [[site, source, f"{gap:+.4f}"] for site, source, gap in sorted(flat, key=lambda one: -one[2])]
        return "\n".join([f"{self.design}: loss {self.loss:.4f}", *align([["site", "without", "change"], *rows])])


def ablate_sources(
    model: nn.Module,
    ids: Int[Tensor, "b t"],
    targets: Int[Tensor, "b t"],
    *,
    sites: Collection[str] | None = None,
    **inputs: Any,
) -> Ablation:
    """The loss change when one source is removed, for every source of every site (or of those named).

    One forward a source and one more, without gradients and in evaluation mode. `targets[:, t]` is what position t
    should predict, as in `token_loss`; `inputs` go to the model with `ids`, such as mask=...
    """
    stream = find_stream(model)
    chosen = [site for site in stream.plan.readers if stream.sources(site)]
    if sites is not None:
        known = {site.name for site in chosen}
        for name in sites:
            if name not in known:
                raise ValueError(f"{stream.spec} mixes no sources at {name!r}; it does at {', '.join(known) or 'none'}")
        chosen = [site for site in chosen if site.name in sites]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            loss = token_loss(logits_of(model(ids, **inputs)), targets)
            gaps: dict[str, list[Tensor]] = {}
            for site in chosen:
                gaps[site.name] = []
                for place in range(len(stream.sources(site))):
                    with observed(stream, Without(stream, site, place)):
                        without = token_loss(logits_of(model(ids, **inputs)), targets)
                    gaps[site.name].append(without - loss)
    finally:
        for module, training in modes:
            module.training = training
    change = {
        site.name: dict(zip(stream.sources(site), torch.stack(gaps[site.name]).tolist(), strict=True))
        for site in chosen
    }
    return Ablation(stream.spec, loss.item(), change)


class Without(Observer):
    """Takes one source, or a share of it, from what a site reads."""

    def __init__(self, stream: Stream, site: Site, place: int, share: float = 1.0) -> None:
        self.stream, self.site, self.place, self.share = stream, site, place, share

    def lanes(self, state: Any, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if site != self.site:
            return lanes
        routing = self.stream.routing(state, site)
        assert routing is not None  # the site has sources
        value, weights = routing.values[self.place], routing.weights[:, self.place]
        lost = self.share * routing.scale * weights.repeat_interleave(value.shape[-1] // weights.shape[-1], -1) * value
        return tuple(lane - part.to(lane.dtype) for lane, part in zip(lanes, lost, strict=True))
