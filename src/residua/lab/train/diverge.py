"""Where a run broke: the first number that is not finite, by the site and the parameter it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from residua.lab.train.placement import local, whole
from residua.lab.train.ranks import ALONE, Agreed, Ranks
from residua.lab.train.sampler import Batch
from residua.model import Transformer
from residua.plan import Site
from residua.runner import Observer, observed
from residua.stream import Read, State


class Diverged(Agreed, RuntimeError):
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


class Eyes(Observer):
    """Shows every tensor of a forward pass to a function."""

    def __init__(self, look: Callable[[Seen], None]) -> None:
        self.look = look

    def opened(self, x: Tensor) -> None:
        self.look(Seen("embed", "output", x))

    def lanes(self, state: State, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not site.index:
            self._all("embed", "opened state", pytree.tree_leaves(state))
        self._all(site.name, "read", lanes)
        return lanes

    def read(self, state: State, site: Site, lanes: tuple[Tensor, ...], read: Read) -> None:
        self._all(site.name, "normalised read", read.lanes)

    def wrote(self, site: Site, y: Tensor, state: State) -> None:
        self.look(Seen(site.name, "output", y))
        self._all(site.name, "state after its write", pytree.tree_leaves(state))

    def _all(self, site: str, what: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.look(Seen(site, what, tensor))


@torch.no_grad()
def watch(model: Transformer, ids: Int[Tensor, "b t"], look: Callable[[Seen], None]) -> None:
    """Run a forward pass, and look at the embedding; at what every site reads before its norm and after it, its output
    and the state it leaves; and at the logits."""
    with observed(model.stream, Eyes(look)):
        logits = model(ids)
    look(Seen("head", "logits", logits))


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


def explain_loss(model: Transformer, step: int, loss: float, batches: list[Batch], ranks: Ranks = ALONE) -> Diverged:
    """Why the loss of an update is not finite: the forward pass again, looking at every tensor. All ranks call it."""
    if broken := explain_parameters(model, step, loss, ranks):
        return broken
    found: Found | None = None
    largest = 0.0

    def look(seen: Seen) -> None:
        nonlocal found, largest
        if found is None and not finite(seen.tensor):
            found = _depth(model, seen.site), seen.site, not_finite(loss, seen.site, seen.what, largest)
        elif found is None:
            largest = max(largest, float(seen.tensor.abs().max()))

    for batch in batches:
        if found is None or not ranks.alone:  # the others still need this rank's pieces
            largest = largest if found else 0.0
            watch(model, batch.inputs, look)
    return first(step, found, ranks) or in_the_loss(step, loss)


def not_finite(loss: float, site: str, what: str, largest: float) -> str:
    """How a tensor of the forward pass is named."""
    return (
        f"the loss is {loss}: first not finite is the {what} of site {site} "
        f"(the largest number before it was {largest:.3g})"
    )


def in_the_loss(step: int, loss: float) -> Diverged:
    """Of a forward pass in which nothing is wrong."""
    return Diverged(step, "head", f"the loss is {loss}: every site is finite, so it is the cross entropy of the logits")


def explain_parameters(model: nn.Module, step: int, loss: float, ranks: Ranks = ALONE) -> Diverged | None:
    """The first parameter that is not finite, of a model of our own or of any other; None if all are."""
    found: Found | None = None
    for name, parameter in model.named_parameters():
        if not finite(local(parameter)):
            site, said = _where(model, name)
            message = f"the loss is {loss}: parameter {said} is not finite since the last update"
            found = _depth(model, site), site, message
            break
    return first(step, found, ranks)


def explain_gradient(model: nn.Module, step: int, norm: float, limit: float, ranks: Ranks = ALONE) -> Diverged:
    """Which gradient exploded: the one nearest the loss that is not finite, or else the largest. All ranks call it."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not finite(local(gradient))]
    found: Found | None = None
    if broken:
        # the backward pass carries it from there to everything before
        known = isinstance(model, Transformer)
        depth = {name: _depth(model, _where(model, name)[0]) if known else at for at, name in enumerate(broken)}
        name = max(broken, key=depth.__getitem__)
        site, said = _where(model, name)
        found = -depth[name], site, f"the gradient of {said} is not finite, though the loss is"
    if one := first(step, found, ranks):
        return one
    sizes = {name: float(whole(gradient.norm())) for name, gradient in gradients.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    size, name = max(ranks.tell([sizes.get(largest, 0.0), largest]), key=lambda told: told[0])
    site, said = _where(model, name)
    return Diverged(
        step,
        site,
        f"the gradient exploded: its norm {norm:.3g} is above explode={limit:g}, most of it from {said} "
        f"(norm {size:.3g})",
    )


Found = tuple[int, str, str]
"""Where in the order of a pass something is wrong, the site, and what is said of it."""


def first(step: int, found: Found | None, ranks: Ranks) -> Diverged | None:
    """What comes first of all that ranks found, on all ranks; of two at one place, the lower rank's."""
    told = [(*each, rank) for rank, each in enumerate(ranks.tell(found)) if each is not None]
    if not told:
        return None
    _, site, message, rank = min(told, key=lambda each: each[0])
    return Diverged(step, site, message if ranks.alone else f"rank {rank}: {message}")


def _depth(model: nn.Module, site: str) -> int:
    """The place of a site in the order of reading; what belongs to none comes before all."""
    order = {each.name: each.index for each in model.plan.readers} if isinstance(model, Transformer) else {}
    return order.get(site, -1)


def _where(model: nn.Module, name: str) -> tuple[str, str]:
    """The site of a parameter and how it is told; in a model that is not ours, its own name is all there is."""
    if not isinstance(model, Transformer):
        return name, name
    site = owner(model, name)
    return site, f"{name} (site {site})"


def finite(tensor: Tensor) -> bool:
    """Whether every number is."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
