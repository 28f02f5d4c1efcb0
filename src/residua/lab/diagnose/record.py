"""with record_routing(model) as record: model(ids)

The record holds, for every site, the sources by name, the weights of the last forward, and means over all forwards
of the context. The record observes the runner of the stream, so that any backbone that keeps the contract can be
recorded: ours and converted ones, in any precision. Outside the context nothing is paid.

A forward begins at `open`; a site counts once in it. What runs inside a backward pass is a recomputation
(checkpointing) and is not counted. Several recordings may run at once. A compiled model runs
uncompiled while it is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from residua.lab.diagnose.metrics import JUDGED_SOURCES
from residua.lab.diagnose.site import SiteRecord
from residua.lab.diagnose.table import routing_table
from residua.plan import Plan, Site
from residua.runner import Observer, observed
from residua.stream import Read, Stream

NOTHING = "nothing was recorded: call the model inside `with record_routing(model)`"


@contextmanager
def record_routing(
    model: nn.Module, *, weights: bool = True, similarity: bool = True, gradients: bool = False
) -> Iterator[RoutingRecord]:
    """Record the reads and writes of a model's residual stream inside the context; yields the record.

    weights:     keep every site's weights of the last forward (the means need no memory).
    similarity:  compare the sources of a site with each other, which costs n^2 d a token.
    gradients:   norm of the loss gradient at every sublayer's output, for backward passes run in the context.

    Raises ValueError for a model that does not hold exactly one stream.
    """
    stream = find_stream(model)
    record = RoutingRecord(stream, weights=weights, similarity=similarity, gradients=gradients)
    with observed(stream, record):
        yield record


class RoutingRecord(Observer):
    """What a stream was seen to do; `record["l3_attn"]` is one site of it."""

    def __init__(self, stream: Stream, *, weights: bool, similarity: bool, gradients: bool) -> None:
        self.design, self.plan = stream.spec, stream.plan
        self.sites = {site.name: SiteRecord(site, stream.sources(site)) for site in stream.plan.readers}
        self.forwards = 0
        self.tokens = 0
        self._stream, self._keep, self._similarity, self._gradients = stream, weights, similarity, gradients
        self._seen: set[tuple[str, str]] = set()

    def __getitem__(self, site: str) -> SiteRecord:
        if site not in self.sites:
            raise KeyError(f"no site {site!r} in this record; it has {', '.join(self.sites)}")
        return self.sites[site]

    def weights(self) -> dict[str, Float[Tensor, "lane n b t group"]]:
        """The weights of the last forward, of every site that mixes sources."""
        self._need_forward()
        return {name: site.weights for name, site in self.sites.items() if site.weights is not None}

    def summary(self) -> dict[str, Any]:
        """Everything but the raw weights, ready for JSON: the whole network, its deep third, and every site.

        The means over sites leave out those with one source, which have no choice, and the share of collapsed
        sites those with fewer than three. The deep third is the last third of the blocks, and the head.
        """
        self._need_forward()
        sites = [site.summary() for site in self.sites.values()]
        return {
            "design": self.design,
            "forwards": self.forwards,
            "tokens": self.tokens,
            "network": _average(sites),
            "deep_third": _average([site for site in sites if in_deep_third(self.plan, site["layer"])]),
            "sites": sites,
        }

    def table(self) -> str:
        """The summary as text, a line a site."""
        return routing_table(self.summary())

    def _repr_html_(self) -> str:
        from residua.lab.diagnose.show import routing_html

        return routing_html(self.summary()) if self.forwards else f"<p>{NOTHING}</p>"

    def opened(self, x: Tensor) -> None:
        if in_backward():
            return
        self._seen.clear()
        self.forwards += 1
        self.tokens += x.shape[0] * x.shape[1]

    def _first(self, what: str, site: Site) -> bool:
        """Whether this forward has not yet seen this; and now it has."""
        key = what, site.name
        if in_backward() or key in self._seen:
            return False
        self._seen.add(key)
        return True

    @torch.no_grad()
    def read(self, state: Any, site: Site, lanes: tuple[Tensor, ...], read: Read) -> None:
        if not self._first("read", site):
            return
        seen = self.sites[site.name]
        for lane in lanes:
            seen.see_square("stream", lane)
        for name, values in self._stream.gates(state, site, read).items():
            seen.see_gate(name, values)
        routing = self._stream.routing(state, site)
        if routing is not None:
            seen.see_routing(routing, keep=self._keep, similarity=self._similarity)

    def wrote(self, site: Site, y: Tensor, state: Any) -> None:
        seen = self.sites[site.name]
        if self._gradients and y.requires_grad:
            # On every pass: a checkpoint may run its first without gradients; of two, one has a backward.
            y.register_hook(seen.see_gradient)
        if self._first("write", site):
            with torch.no_grad():
                seen.see_square("output", y)

    def _need_forward(self) -> None:
        if not self.forwards:
            raise RuntimeError(NOTHING)


def find_stream(model: nn.Module) -> Stream:
    """The one stream of a model: ours, a converted one, or one inside a wrapper such as DDP or a compiled model."""
    streams = list(dict.fromkeys(_streams(model)))
    if len(streams) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(streams)} residual streams, and exactly one can be observed; "
            "pass a residua Transformer or a converted model"
        )
    return streams[0]


def _streams(module: nn.Module) -> Iterator[Stream]:
    """Every stream that a model runs. One that peft trains in full (`modules_to_save`) is its wrapper, which stands for
    the original or for a copy, whichever is at work."""
    if isinstance(module, Stream) or isinstance(module._modules.get("original_module"), Stream):
        yield module  # type: ignore[misc]
        return
    for child in module.children():
        yield from _streams(child)


def in_backward() -> bool:
    """Whether autograd is running: a read or write then is a recomputation of one already seen."""
    return torch._C._current_graph_task_id() != -1


def logits_of(output: Any) -> Tensor:
    """The logits: what our models return, and an attribute of what Hugging Face's do."""
    return output if isinstance(output, Tensor) else output.logits


def in_deep_third(plan: Plan, layer: int) -> bool:
    """Whether a block is among the last third; the head counts as the block after the last."""
    return 3 * layer >= 2 * plan.depth


def _average(sites: list[dict[str, Any]]) -> dict[str, Any]:
    mixing = [site for site in sites if "routing" in site and len(site["sources"]) > 1]
    judged = [site for site in mixing if len(site["sources"]) >= JUDGED_SOURCES]
    collapsed = [site["site"] for site in judged if site["routing"]["collapsed"]]
    found: dict[str, Any] = {
        name: _mean([site["routing"] for site in mixing], name)
        for name in ("max_weight", "normalised_entropy", "effective_sources", "contrast", "effective_rank")
    }
    return found | {
        "mixing_sites": len(mixing),
        "judged_sites": len(judged),
        "collapsed_sites": collapsed,
        "collapsed_share": len(collapsed) / len(judged) if judged else None,
    }


def _mean(rows: list[Mapping[str, Any]], name: str) -> float | None:
    values = [row.get(name) for row in rows]
    if not values or None in values:
        return None
    return sum(values) / len(values)  # type: ignore[arg-type]  # None was ruled out
