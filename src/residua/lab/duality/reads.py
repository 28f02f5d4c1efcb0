"""DepthRead_K(U) = transpose(ShortSWA_K(transpose(U))), both sides made of the parts that models are built from.

U [n b t d] is a stack: n sources of every token, the embedding first. Depth: the design `depthswa` walks the stack,
and at its l-th site reads z_l from the last K sources. Sequence: the sublayer `swa` is given the n sources of each
token as the n tokens of a sequence of its own. Weights, stack and probe are the same tensors on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from residua import ops
from residua.model.config import ModelConfig
from residua.model.sublayers import ShortSWA
from residua.model.transformer import Transformer
from residua.plan import Plan
from residua.registry import build
from residua.runner import walk
from residua.testing import error

Stack = Float[Tensor, "n b t d"]
QUANTITIES = ("output", "stack", "W_Q", "W_K", "W_V")


@dataclass(frozen=True, slots=True)
class Given:
    """A stack, and weights shared by all its depths."""

    stack: Stack
    query: Float[Tensor, "d d"]
    key: Float[Tensor, "d d"]
    value: Float[Tensor, "d d"]
    heads: int = 1
    key_norm: bool = False

    def to(self, dtype: torch.dtype) -> Given:
        """The same numbers in another type, and nothing that remembers where they came from."""
        stack, query, key, value = (x.detach().to(dtype) for x in self.leaves)
        return replace(self, stack=stack, query=query, key=key, value=value)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What both sides are differentiated by, in the order of `QUANTITIES` after the output."""
        return self.stack, self.query, self.key, self.value


Read = Callable[[Given, int], Stack]
"""The reads of all depths for a window."""


class _Depth(nn.Module):
    """A stream whose sublayers answer so that its sources are the stack."""

    def __init__(self, given: Given, window: int, shared: bool) -> None:
        super().__init__()
        count, _, _, width = given.stack.shape
        self.plan = Plan.regular(width, count, ("mlp",))
        options = {"sources": "deltas", "unit": "sublayer", "window": window, "heads": given.heads, "shared": shared}
        normed = given.key_norm and min(window, count) > 1
        self.stream = build({"name": "depthswa", "key_norm": normed, **options}, self.plan)

    def forward(self, stack: Stack) -> Stack:
        outputs = (*stack[1:], stack[-1])
        steps = walk(self.stream, stack[0], lambda site, read: outputs[site.index])
        return torch.stack([step.lanes[0] for step in steps if step.site.kind != "head"])


def over_depth(given: Given, window: int, *, queries: Float[Tensor, "n d d"] | None = None) -> Stack:
    """The reads of the design `depthswa`, site by site; `queries` gives every depth a W_Q of its own."""
    module = _Depth(given, window, queries is None).to(given.stack)
    weights = {"query": given.query, "key": given.key, "value": given.value}
    named = {name: weights[name.rpartition(".")[2]] for name, _ in module.named_parameters()}
    if queries is not None:
        places = {f"stream.at.{site.name}.project.query": site.index for site in module.plan.sites}
        named |= {name: queries[place] for name, place in places.items() if name in named}
    return functional_call(module, named, (given.stack,))


def over_sequence(given: Given, window: int, **options: bool | str) -> Stack:
    """The sublayer `swa` over the transposed stack: every token's history is a sequence of its own."""
    count, batch, tokens, width = given.stack.shape
    sequences = given.stack.permute(1, 2, 0, 3).flatten(0, 1)  # [(b t) n d]
    layout = ":".join(["swa", f"window={window}", "position=none", *(f"{k}={v}" for k, v in options.items())])
    config = ModelConfig(vocab=1, width=width, depth=1, heads=given.heads, layout=layout)
    model = Transformer(config).to(given.stack)
    (sublayer,) = model.sublayers()
    assert isinstance(sublayer, ShortSWA)
    weights = {"q.weight": given.query.T, "k.weight": given.key.T, "v.weight": given.value.T}
    weights["o.weight"] = torch.eye(width).to(given.stack)
    keyed = ops.rms_norm(sequences, 1e-6) if given.key_norm else sequences
    context = model.context(torch.zeros(1, count, dtype=torch.long))
    read: Tensor = functional_call(sublayer, weights, (keyed, keyed, sequences), {"context": context})
    return read.unflatten(0, (batch, tokens)).permute(2, 0, 1, 3)


def with_gradients(read: Read, given: Given, window: int) -> dict[str, Tensor]:
    """The reads, and their gradients by stack and weights under one fixed probe."""
    leaves = [leaf.clone().requires_grad_() for leaf in given.leaves]
    own = replace(given, stack=leaves[0], query=leaves[1], key=leaves[2], value=leaves[3])
    out = read(own, window)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, probe, allow_unused=True, materialize_grads=True)
    return dict(zip(QUANTITIES, (out.detach(), *gradients), strict=True))


def gaps(one: Read, other: Read, given: Given, window: int) -> dict[str, float]:
    """The relative error of every quantity between two reads."""
    ours, theirs = (with_gradients(read, given, window) for read in (one, other))
    return {name: _relative(ours[name], theirs[name], theirs) for name in QUANTITIES}


def _relative(ours: Tensor, theirs: Tensor, all_theirs: dict[str, Tensor]) -> float:
    """RMS error over RMS reference. Where the reference is zero but for rounding (W_Q and W_K of a window of one, whose
    weight is 1 whatever the logit), the error is judged beside the gradient of W_V."""
    size = all_theirs["W_V"].double().square().mean().sqrt()
    if theirs.double().square().mean().sqrt() < 1e-6 * size:
        return float((ours - theirs).double().square().mean().sqrt() / size)
    return error(ours, theirs)
