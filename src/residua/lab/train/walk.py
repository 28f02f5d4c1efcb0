"""A forward pass taken site by site through the stream's contract, to look at what a plain forward hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
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
    for step in model.walk(ids):
        name = step.site.name
        if not step.site.index:
            yield Seen("embed", "output", model.embed(ids))
            for leaf in pytree.tree_leaves(step.state):
                yield Seen("embed", "opened state", leaf)
        for lane in step.lanes:
            yield Seen(name, "read", lane)
        for lane in step.read.lanes:
            yield Seen(name, "normalised read", lane)
        if step.y is None:
            yield Seen(name, "logits", model.logits(step.read.lanes[0]))
            return
        yield Seen(name, "output", step.y)
        for leaf in pytree.tree_leaves(step.after):
            yield Seen(name, "state after its write", leaf)


def stream_rms(model: Transformer, ids: Int[Tensor, "b t"]) -> dict[str, float]:
    """RMS of what every site reads, before its norm, in reading order; of the first lane where there are several."""
    found: dict[str, float] = {}
    for seen in walk(model, ids):
        if seen.what == "read" and seen.site not in found:
            found[seen.site] = seen.tensor.float().square().mean().sqrt().item()
    return found
