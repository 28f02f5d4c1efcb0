"""Run a stack that can be checked by hand, through a stream or its oracle, and see what every sublayer was fed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residua import Stream
from tests.streams.harness import Norm, Sublayer, run_stream

BY = ("stream", "oracle")


class Trace(NamedTuple):
    """What a run showed."""

    inputs: list[tuple[Tensor, ...]]
    """The lanes of every sublayer."""
    out: Tensor
    """What the head read."""


def vector(*values: float) -> Tensor:
    """One token in one row."""
    return torch.tensor(values, dtype=torch.float64)[None, None]


def constant(*values: float) -> Sublayer:
    """A sublayer that answers the same whatever it reads: it puts a chosen source into the stream."""
    return lambda *lanes: vector(*values).expand_as(lanes[0])


def trace(
    stream: Stream,
    x: Tensor,
    sublayers: Sequence[Sublayer],
    norms: Sequence[Norm] | None = None,
    by: str = "stream",
) -> Trace:
    """Run `stream`, or its oracle with the same parameters; without norms where none are given."""
    plan = stream.plan
    norms = [lambda one: one] * len(plan.readers) if norms is None else norms
    inputs: list[tuple[Tensor, ...]] = []

    def watched(f: Sublayer) -> Sublayer:
        def g(*lanes: Tensor) -> Tensor:
            inputs.append(lanes)
            return f(*lanes)

        return g

    fs = [watched(f) for f in sublayers]
    if by == "stream":
        return Trace(inputs, run_stream(stream, x, fs, norms))
    oracle = importlib.import_module(f"tests.oracles.{stream.name}")
    layout = tuple(site.kind for site in plan.block(0))
    parameters = {**stream.state_dict(), **dict(stream.named_parameters())}
    out = oracle.forward(x, parameters, fs, norms, layers=plan.depth, layout=layout, **stream.options)
    return Trace(inputs, out)


def close(actual: Tensor, expected: Sequence[float] | Tensor, tolerance: float = 1e-12) -> bool:
    """Whether every entry agrees; the default is for values that are exact on paper."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual.detach().flatten(), expected.flatten(), rtol=0, atol=tolerance)


def set_(stream: Stream, **values: object) -> None:
    """Set parameters by name, `__` for the dots and without the leading `at`: l1_attn__alpha=[0, 1]."""
    parameters = dict(stream.named_parameters())
    for name, value in values.items():
        parameter = parameters["at." + name.replace("__", ".")]
        value = torch.as_tensor(value, dtype=parameter.dtype)
        assert value.shape == parameter.shape, name
        with torch.no_grad():
            parameter.copy_(value)


def state_at(stream: Stream, name: str, x: Tensor, sublayers: Sequence[Sublayer]) -> object:
    """The state that the site called `name` reads, in a stack without norms."""
    state = stream.open(x)
    same: Callable[..., tuple[Tensor, ...]] = lambda *lanes: lanes  # noqa: E731
    for site in stream.plan.sites:
        if site.name == name:
            break
        state = stream(state, site, same, sublayers[site.index])
    return state
