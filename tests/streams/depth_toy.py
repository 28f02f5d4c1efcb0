"""The shared toy of the depth-reading designs, and the random network in which their identities must hold.

Toy: e = (1, 1), six linear sublayers without norms, the query (0, ln 3 / 2) at every site, key gain 1, eps 0.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import residua
from residua import Plan, Stream
from tests.streams.harness import Norm, Sublayer, randomise, run_stream, toy_norms, toy_sublayers

LAYOUT = ("attn", "mlp")
QUERY = (0.0, math.log(3) / 2)
DIGITS = 5e-7  # the tables give six decimals

TOY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.stack([x[..., 0], -x[..., 1]], -1),
    lambda x: 2 * x,
    lambda x: x.flip(-1),
    lambda x: x,
    lambda x: torch.stack([x[..., 1], -x[..., 0]], -1),
    lambda x: 0.5 * x,
)


def vector(*numbers: float) -> Tensor:
    """One token of one sequence."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, -1)


def set_queries(stream: Stream, value: Sequence[float]) -> None:
    """The same query at every site that has one."""
    with torch.no_grad():
        for name, parameter in stream.named_parameters():
            if name.endswith(".query"):
                parameter.copy_(torch.tensor(value))


def run_toy(
    spec: str, layers: int, query: Sequence[float] = QUERY, sublayers: Sequence[Sublayer] = TOY, oracle: bool = False
) -> list[tuple[float, ...]]:
    """Every sublayer's input and then the head's, from the stream or from its oracle."""
    stream = residua.build(spec, Plan.regular(2, layers, LAYOUT)).double()
    set_queries(stream, query)
    sublayers = sublayers[: 2 * layers]
    seen: list[Tensor] = []

    def watched(f: Sublayer) -> Sublayer:
        def call(x: Tensor) -> Tensor:
            seen.append(x)
            return f(x)

        return call

    watching = [watched(f) for f in sublayers]
    norms: list[Norm] = [lambda x: x] * (2 * layers + 1)
    with torch.no_grad():
        if oracle:
            module = importlib.import_module(f"tests.oracles.{stream.name}")
            parameters = dict(stream.named_parameters())
            out = module.forward(
                vector(1, 1), parameters, watching, norms, layers=layers, layout=LAYOUT, **stream.options
            )
        else:
            out = run_stream(stream, vector(1, 1), watching, norms)
    return [tuple(x.flatten().tolist()) for x in (*seen, out)]


class Net:
    """A stream among random sublayers, with norms that have no eps: where the identities hold exactly."""

    def __init__(
        self,
        spec: str,
        depth: int = 4,
        layout: Sequence[str] = LAYOUT,
        width: int = 8,
        norm: str = "rms",
        routed: bool = True,
        seed: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plan = Plan.regular(width, depth, layout)
        self.sublayers = toy_sublayers(self.plan, generator)
        self.norms = NORMS[norm](self.plan, generator)
        self.x = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
        self.stream = residua.build(spec, self.plan).double()
        self.stream.reset(torch.Generator().manual_seed(seed))
        if routed:
            randomise(self.stream, generator)

    def out(self) -> Tensor:
        """What the head reads."""
        return run_stream(self.stream, self.x, self.sublayers, self.norms)

    def standard(self) -> Tensor:
        """What the head reads when h <- h + f(norm(h))."""
        h = self.x
        for f, norm in zip(self.sublayers, self.norms, strict=False):
            h = h + f(norm(h))
        return self.norms[-1](h)

    def states(self) -> list:
        """The state before every site and before the head."""
        state, states = self.stream.open(self.x), []
        for site in self.plan.sites:
            states.append(state)
            norm = self.norms[site.index]
            read = self.stream.read(state, site, lambda *lanes, norm=norm: tuple(norm(one) for one in lanes))
            state = self.stream.write(state, site, read, self.sublayers[site.index](*read.lanes))
        return [*states, state]

    def read(self, state, site) -> tuple[Tensor, ...]:
        """What a site takes from the stream before its norm."""
        return self.stream.read(state, site, lambda *lanes: lanes).lanes


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference."""
    return (one - other).abs().max().item()


def _layer_norms(plan: Plan, generator: torch.Generator) -> list[Norm]:
    gains = [1 + 0.3 * torch.randn(plan.width, generator=generator, dtype=torch.float64) for _ in plan.readers]
    return [lambda x, gain=gain: F.layer_norm(x, x.shape[-1:], gain, eps=0.0) for gain in gains]


NORMS: dict[str, Callable[[Plan, torch.Generator], list[Norm]]] = {
    "rms": lambda plan, generator: toy_norms(plan, generator, eps=0.0),
    "rms, large eps": lambda plan, generator: toy_norms(plan, generator, eps=1e-2),
    "layer": _layer_norms,
    "none": lambda plan, generator: [lambda x: x] * len(plan.readers),
}
"""Pre-norms by name: the first and third ignore the scale of their input, the others do not."""
