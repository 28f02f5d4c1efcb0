"""Run a stream over small sublayers in float64, and the same through an oracle, to compare every gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import residua
from residua import Plan, Stream

Sublayer = Callable[..., Tensor]
Norm = Callable[[Tensor], Tensor]


def specs() -> list[str]:
    """Every design with every case of its options, as spec strings."""
    return [f"{name}:{case}" if case else name for name in residua.names() for case in residua.design(name).cases]


def toy_sublayers(plan: Plan, generator: torch.Generator, stream: Stream | None = None) -> list[Sublayer]:
    """tanh(q A + k B + v C) for a site with three lanes, tanh(x A) for the rest; one lane feeds all three.

    stream: whose sites may take more channels than the width.
    """

    def draw(extra: int) -> Tensor:
        return torch.randn(plan.width, plan.width + extra, generator=generator, dtype=torch.float64) / plan.width**0.5

    def attention(extra: int) -> Sublayer:
        A, B, C = draw(extra), draw(extra), draw(extra)

        def f(q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
            return torch.tanh(q @ A + (q if k is None else k) @ B + (q if v is None else v) @ C)

        return f

    def single(extra: int) -> Sublayer:
        A = draw(extra)
        return lambda x: torch.tanh(x @ A)

    extras = [0 if stream is None else stream.extra(site) for site in plan.sites]
    made = zip(plan.sites, extras, strict=True)
    return [attention(extra) if site.lanes == 3 else single(extra) for site, extra in made]


def toy_norms(plan: Plan, generator: torch.Generator, eps: float = 1e-6) -> list[Norm]:
    """An RMS norm with a gain of its own for every site and the head."""
    gains = [1 + 0.3 * torch.randn(plan.width, generator=generator, dtype=torch.float64) for _ in plan.readers]
    return [lambda x, gain=gain: F.rms_norm(x, x.shape[-1:], gain, eps) for gain in gains]


def run_stream(stream: Stream, x: Tensor, sublayers: Sequence[Sublayer], norms: Sequence[Norm]) -> Tensor:
    """The head's input after every sublayer has read and written."""

    def lanes(norm: Norm) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *inputs: tuple(norm(one) for one in inputs)

    state = stream.open(x, **token_ids(stream, x))
    for site in stream.plan.sites:
        read = stream.read(state, site, lanes(norms[site.index]))
        state = stream.write(state, site, read, sublayers[site.index](*read.lanes))
    (out,) = stream.read(state, stream.plan.head, lanes(norms[-1])).lanes
    return out


def token_ids(stream: Stream, x: Tensor) -> dict[str, Tensor]:
    """What a design that looks tokens up is given beside its embeddings: all of them in turn."""
    ids = torch.arange(x[..., 0].numel()).reshape(x.shape[:2]) % stream.plan.vocab
    return {"ids": ids} if stream.takes_ids else {}


def randomise(stream: Stream, generator: torch.Generator) -> None:
    """Move every parameter away from its start, so that no term hides behind a zero or a one."""
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def compare(spec: str, layout: Sequence[str], depth: int = 4, width: int = 8) -> dict[str, float]:
    """The largest error of the output and of every gradient, stream against oracle, by name."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    plan = Plan.regular(width, depth, layout, vocab=7)
    stream = residua.build(spec, plan).double()
    randomise(stream, generator)
    sublayers, norms = toy_sublayers(plan, generator, stream), toy_norms(plan, generator)
    x = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    probe = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)

    ours = x.clone().requires_grad_()
    out = run_stream(stream, ours, sublayers, norms)
    (out * probe).sum().backward()

    theirs = x.clone().requires_grad_()
    parameters = {name: p.clone().requires_grad_() for name, p in stream.state_dict().items()}
    oracle = importlib.import_module(f"tests.oracles.{stream.name}")
    expected = oracle.forward(
        theirs,
        parameters,
        sublayers,
        norms,
        layers=depth,
        layout=tuple(layout),
        **stream.options,
        **token_ids(stream, x),
    )
    (expected * probe).sum().backward()

    errors = {"output": (out - expected).abs().max().item(), "input": (ours.grad - theirs.grad).abs().max().item()}
    for name, parameter in stream.named_parameters():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other = parameters[name].grad
        errors[name] = (mine - (torch.zeros_like(mine) if other is None else other)).abs().max().item()
    return errors
