"""Where a run broke: the first number that is not finite, by the site and the parameter it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from residua.lab.train.sampler import Batch
from residua.model import Transformer


class Diverged(RuntimeError):
    """Training cannot go on: the loss is not finite or the gradient exploded. `site` is where it began."""

    def __init__(self, step: int, site: str, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step, self.site = step, site


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


def owner(model: Transformer, name: str) -> str:
    """The site that a parameter belongs to; "embed", or "head" for the final norm and an untied head."""
    if name.startswith("stream.at."):
        return name.split(".")[2]
    if name.startswith("blocks."):
        _, block, _, place, *_ = name.split(".")
        return model.plan.block(int(block))[int(place)].name
    if name.startswith("stream."):
        return "stream"
    return "embed" if name.startswith("embed.") else "head"


def explain_loss(model: Transformer, step: int, loss: float, batches: list[Batch]) -> Diverged:
    """Why the loss of an update is not finite: the forward pass again, looking at every tensor."""
    if broken := explain_parameters(model, step, loss):
        return broken
    for batch in batches:
        largest = 0.0
        for seen in walk(model, batch.inputs):
            if not finite(seen.tensor):
                return Diverged(
                    step,
                    seen.site,
                    f"the loss is {loss}: first not finite is the {seen.what} of site {seen.site} "
                    f"(the largest number before it was {largest:.3g})",
                )
            largest = max(largest, float(seen.tensor.abs().max()))
    return Diverged(step, "head", f"the loss is {loss}: every site is finite, so it is the cross entropy of the logits")


def explain_parameters(model: nn.Module, step: int, loss: float) -> Diverged | None:
    """The first parameter that is not finite, of a model of our own or of any other; None if all are."""
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            site, said = _where(model, name)
            return Diverged(step, site, f"the loss is {loss}: parameter {said} is not finite since the last update")
    return None


def explain_gradient(model: nn.Module, step: int, norm: float, limit: float) -> Diverged:
    """Which gradient exploded: the one nearest the loss that is not finite, or else the largest."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not finite(gradient)]
    if broken:
        # the backward pass carries it from there to everything before
        order = {site.name: site.index for site in model.plan.readers} if isinstance(model, Transformer) else {}
        depth = {name: order.get(_where(model, name)[0], -1) if order else place for place, name in enumerate(broken)}
        site, said = _where(model, max(broken, key=depth.__getitem__))
        return Diverged(step, site, f"the gradient of {said} is not finite, though the loss is")
    name = max(gradients, key=lambda one: float(gradients[one].norm()))
    site, said = _where(model, name)
    return Diverged(
        step,
        site,
        f"the gradient exploded: its norm {norm:.3g} is above explode={limit:g}, most of it from {said} "
        f"(norm {float(gradients[name].norm()):.3g})",
    )


def _where(model: nn.Module, name: str) -> tuple[str, str]:
    """The site of a parameter and how it is told; in a model that is not ours, its own name is all there is."""
    if not isinstance(model, Transformer):
        return name, name
    site = owner(model, name)
    return site, f"{name} (site {site})"


def finite(tensor: Tensor) -> bool:
    """Whether every number is."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
