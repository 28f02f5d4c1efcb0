"""Where a run broke: the first number that is not finite, by the site and the parameter it came from."""

from __future__ import annotations

from torch import Tensor

from residua.lab.train.sampler import Batch
from residua.lab.train.walk import walk
from residua.model import Transformer


class Diverged(RuntimeError):
    """Training cannot go on: the loss is not finite or the gradient exploded. `site` is where it began."""

    def __init__(self, step: int, site: str, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step, self.site = step, site


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
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            site = owner(model, name)
            return Diverged(
                step, site, f"the loss is {loss}: parameter {name} (site {site}) is not finite since the last update"
            )
    for batch in batches:
        largest = 0.0
        for seen in walk(model, batch.inputs):
            if not _finite(seen.tensor):
                return Diverged(
                    step,
                    seen.site,
                    f"the loss is {loss}: first not finite is the {seen.what} of site {seen.site} "
                    f"(the largest number before it was {largest:.3g})",
                )
            largest = max(largest, float(seen.tensor.abs().max()))
    return Diverged(step, "head", f"the loss is {loss}: every site is finite, so it is the cross entropy of the logits")


def explain_gradient(model: Transformer, step: int, norm: float, limit: float) -> Diverged:
    """Which gradient exploded: the one nearest the loss that is not finite, or else the largest."""
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    order = {site.name: site.index for site in model.plan.readers}
    broken = [name for name, gradient in gradients if not _finite(gradient)]
    if broken:
        # the backward pass carries it from there to everything before
        name = max(broken, key=lambda one: order.get(owner(model, one), -1))
        site = owner(model, name)
        return Diverged(step, site, f"the gradient of {name} (site {site}) is not finite, though the loss is")
    name, gradient = max(gradients, key=lambda pair: float(pair[1].norm()))
    site = owner(model, name)
    return Diverged(
        step,
        site,
        f"the gradient exploded: its norm {norm:.3g} is above explode={limit:g}, most of it from {name} "
        f"(site {site}, norm {float(gradient.norm()):.3g})",
    )


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
