"""A forward pass taken site by site through the stream's contract, to look at what a plain forward hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from residua.model import Transformer


class Seen(NamedTuple):
    """One tensor of the pass."""

    site: str
    """A site's name, or "embed"."""
    what: str
    """What it is there, such as "the read of"."""
    tensor: Tensor


@torch.no_grad()
def walk(model: Transformer, ids: Int[Tensor, "b t"]) -> Iterator[Seen]:
    """The embedding; what every site reads before its norm and after it, its output, and the state it leaves."""
    context = model.context(ids)
    embedded = model.embed(ids)
    yield Seen("embed", "output", embedded)
    state = model.stream.open(embedded)
    for leaf in pytree.tree_leaves(state):
        yield Seen("embed", "opened state", leaf)
    for sublayer in model.sublayers():
        site, before = sublayer.site, list[Tensor]()

        def norm(*lanes: Tensor, _norm: object = sublayer.norm, _before: list[Tensor] = before) -> tuple[Tensor, ...]:
            _before.extend(lanes)
            return _norm(*lanes)  # type: ignore[operator]  # a LaneNorm, bound early

        read = model.stream.read(state, site, norm)
        for lane in before:
            yield Seen(site.name, "read", lane)
        for lane in read.lanes:
            yield Seen(site.name, "normalised read", lane)
        y = sublayer(*read.lanes, context=context)
        yield Seen(site.name, "output", y)
        state = model.stream.write(state, site, read, y)
        for leaf in pytree.tree_leaves(state):
            yield Seen(site.name, "state after its write", leaf)
    before = list[Tensor]()

    def last(*lanes: Tensor) -> tuple[Tensor, ...]:
        before.extend(lanes)
        return model.norm(*lanes)

    (x,) = model.stream.read(state, model.plan.head, last).lanes
    for lane in before:
        yield Seen("head", "read", lane)
    yield Seen("head", "normalised read", x)
    yield Seen("head", "logits", F.linear(x, model.embed.weight if model.head is None else model.head.weight))


def stream_rms(model: Transformer, ids: Int[Tensor, "b t"]) -> dict[str, float]:
    """RMS of what every site reads, before its norm, in reading order; of the first lane where there are several."""
    found: dict[str, float] = {}
    for seen in walk(model, ids):
        if seen.what == "read" and seen.site not in found:
            found[seen.site] = seen.tensor.float().square().mean().sqrt().item()
    return found
