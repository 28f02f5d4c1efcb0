"""attribute(model, ids, targets): what each source of each read adds to the logit of a target token.

    read_s = base + scale sum_n w_n v_n,    part_n = scale w_n v_n    (the weights as they were)

    head:   logit = sum_n g . F(part_n) + rest,    g = d logit / d x,  F the final norm at the scale that it had
    others: a_n   = sum_t  d logit / d read_s[t] . part_n[t]           to first order, through all that comes after

The head's numbers are exact: its read is linear given its weights, its norm given its scale, and so is the output
layer. Taking a source from the head's read, at that scale, changes the logit by its number and nothing else. A read
further down goes through a sublayer: there the number is the slope of the logit as the part grows, which is what
`ablate_sources` would find for a small part of the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from residua.lab.diagnose.record import find_stream, logits_of
from residua.plan import Site
from residua.runner import Observer, observed
from residua.stream import Read, Stream

NEAR = 1e-3
"""Of a logit, or of the size of a read: what rounding may leave between a sum and its parts."""


@dataclass(frozen=True, slots=True)
class Paths:
    """What reached the logits of some tokens, one target for each position of a sequence."""

    design: str
    sources: dict[str, tuple[str, ...]]
    """Of every site that mixes."""
    parts: dict[str, Float[Tensor, "n t"]]
    """Site -> what each source adds to the logit of the target of position t."""
    logits: Float[Tensor, " t"]
    rest: Float[Tensor, " t"]
    """What the head's parts leave of the logit: its base and, in a hosted model, a bias."""
    exact: bool
    """Whether the parts of the head and the rest are the logit; False where its norm or its output is another one."""


def attribute(model: nn.Module, ids: Int[Tensor, "1 t"], targets: Int[Tensor, " t"], **inputs: Any) -> Paths:
    """One forward, and one backward a token; `targets[t]` is a token that position t could predict.

    `inputs` go to the model with `ids`. Nothing of the model is changed, and no gradient is left in it.
    """
    if ids.shape != (1, len(targets)):
        raise ValueError(f"one sequence and a target for each of its tokens, not {tuple(ids.shape)} and {len(targets)}")
    stream = find_stream(model)
    seen = _Parts(stream)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad(), observed(stream, seen):
            logits = logits_of(model(ids, **inputs))[0]
    finally:
        for module, training in modes:
            module.training = training
    wanted = logits.gather(1, targets.to(logits.device)[:, None])[:, 0]
    parts = _slopes(seen, wanted)
    rest, exact = wanted.detach().clone(), False
    head = stream.plan.head.name
    if head in seen.parts:
        parts[head], rest, exact = _head(seen, wanted, seen.parts[head])
    return Paths(
        stream.spec,
        {site.name: stream.sources(site) for site in stream.plan.readers if site.name in parts},
        {site.name: parts[site.name].cpu() for site in stream.plan.readers if site.name in parts},
        wanted.detach().cpu(),
        rest.cpu(),
        exact,
    )


class _Parts(Observer):
    """Keeps what every read is made of, and something to differentiate by in each of them."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.parts: dict[str, Float[Tensor, "lane n t d"]] = {}
        self.leaves: dict[str, tuple[Tensor, ...]] = {}
        self.raw: Tensor | None = None
        """What the head read, before its norm."""
        self.normed: Tensor | None = None

    def lanes(self, state: Any, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        routing = self.stream.routing(state, site)
        if routing is None:
            return lanes
        with torch.no_grad():
            values = torch.stack(routing.values)
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            weights = routing.weights.repeat_interleave(values.shape[-1] // routing.weights.shape[-1], -1)
            self.parts[site.name] = (routing.scale * weights * values)[:, :, 0]
        if site.kind == "head":
            self.raw = lanes[0].detach()
            return lanes
        leaves = tuple(torch.zeros_like(lane, requires_grad=True) for lane in lanes)
        self.leaves[site.name] = leaves
        return tuple(lane + leaf for lane, leaf in zip(lanes, leaves, strict=True))

    def read(self, state: Any, site: Site, lanes: tuple[Tensor, ...], read: Read) -> None:
        if site.kind == "head":
            self.normed = read.lanes[0]


def _slopes(seen: _Parts, wanted: Float[Tensor, " t"]) -> dict[str, Float[Tensor, "n t"]]:
    """d logit / d read . part, one backward for every token's logit: they meet in the sublayers."""
    flat = [leaf for leaves in seen.leaves.values() for leaf in leaves]
    found: dict[str, list[Tensor]] = {name: [] for name in seen.leaves}
    if not flat:
        return {}
    for place, logit in enumerate(wanted):
        last = place == len(wanted) - 1
        slopes = iter(
            torch.autograd.grad(logit, flat, retain_graph=not last or seen.normed is not None, allow_unused=True)
        )
        for name, leaves in seen.leaves.items():
            own = [next(slopes) for _ in leaves]
            stacked = torch.stack(
                [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(own, leaves, strict=True)]
            )
            found[name].append(torch.einsum("ltd,lntd->n", stacked[:, 0].to(seen.parts[name].dtype), seen.parts[name]))
    return {name: torch.stack(each, 1) for name, each in found.items()}


def _head(seen: _Parts, wanted: Float[Tensor, " t"], parts: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The parts of the logit itself, what they leave of it, and whether that is all of it."""
    assert seen.raw is not None
    assert seen.normed is not None
    (slope,) = torch.autograd.grad(wanted.sum(), seen.normed)  # after the head's read no token sees another
    raw, normed = seen.raw[0].to(parts.dtype), seen.normed.detach()[0].to(parts.dtype)
    factor, linear = _factor(raw, normed)
    found = torch.einsum("td,ntd->nt", slope[0].to(parts.dtype) * factor, parts[0])
    value = wanted.detach().to(parts.dtype)
    whole = torch.einsum("td,td->t", slope[0].to(parts.dtype), normed)
    base = torch.einsum("td,td->t", slope[0].to(parts.dtype) * factor, raw - parts[0].sum(0))
    flat = bool((whole - value).abs().max() <= NEAR * value.abs().max().clamp_min(1))  # no bias and no soft cap
    return found, base + value - whole, linear and flat


def _factor(raw: Float[Tensor, "t d"], normed: Float[Tensor, "t d"]) -> tuple[Float[Tensor, "t d"], bool]:
    """gain[d] / scale[t] of a norm that divides a token by its size and multiplies each channel by a gain.

    Found from what went in and what came out, whatever the norm is called: gain and scale are fitted in turns, which
    ends at them where there are such. False where no gain and scale explain what came out.
    """
    inverse = raw.square().mean(-1, keepdim=True).clamp_min(1e-30).rsqrt()
    for _ in range(20):
        scaled = inverse * raw
        gain = (scaled * normed).sum(0) / scaled.square().sum(0).clamp_min(1e-30)
        part = gain * raw
        inverse = (part * normed).sum(-1, keepdim=True) / part.square().sum(-1, keepdim=True).clamp_min(1e-30)
    gap = (inverse * gain * raw - normed).square().mean().sqrt()
    return inverse * gain, bool(gap <= NEAR * normed.square().mean().sqrt())
