"""Designs that keep n streams side by side: every sublayer reads a mixture, remixes them and writes into each."""

from __future__ import annotations

import torch
from torch import Tensor

from residua import ops
from residua.plan import Site
from residua.stream import Conversion, Past, Read, Routing, Stream
from residua.streams._parts import Part, constant

EPS = 1e-5
"""Of the layer norm that feeds dynamic weights."""


def home(streams: int, site: Site) -> int:
    """The stream that a site reads at the start: sites take turns, which is what sets the streams apart."""
    return site.index % streams


def copies(x: Tensor, streams: int) -> Tensor:
    """The embedding [b t d], `streams` times: [b t n d]."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, -1)


def names(streams: int) -> tuple[str, ...]:
    """What the streams are called where they are sources."""
    return tuple(f"stream{i}" for i in range(streams))


def mixture(H: Tensor, weights: Tensor) -> Routing:
    """A read with one weight [b t n] a stream."""
    return Routing(H.unbind(-2), weights.movedim(-1, 0)[None, ..., None])


class Dynamic(Part):
    """s tanh(layernorm(H) W), which streams or fractions H [n, d] add to static weights; W = 0 and s = 0.01 at the
    start."""

    gain: Tensor
    shift: Tensor
    W_alpha: Tensor
    W_beta: Tensor
    s_alpha: Tensor
    s_beta: Tensor

    def add_dynamic(self, width: int, columns: int) -> None:
        """The parameters of it, for so many columns of alpha, and one of beta."""
        self.add("gain", (width,), constant(1.0))
        self.add("shift", (width,), constant(0.0))
        self.add("W_alpha", (width, columns), constant(0.0))
        self.add("W_beta", (width,), constant(0.0))
        self.add("s_alpha", (1,), constant(0.01))
        self.add("s_beta", (1,), constant(0.01))

    def moved(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to alpha [.. n columns] and to beta [.. n]."""
        W = torch.cat([self.W_alpha, self.W_beta[:, None]], 1)
        # the gain and the shift of the norm, as the matrix and the bias behind it
        bounded = ops.normed_project(H, self.gain[:, None] * W, self.shift @ W, eps=EPS, centered=True).tanh()
        return self.s_alpha * bounded[..., :-1], self.s_beta * bounded[..., -1]


class ParallelStream(Stream[Tensor]):
    """H <- rest + w' y over n streams H [n, d], all of them the embedding at first; `read` carries rest and w.

    `self.part(site)(H)` gives the weights of the read, [b t n], first; the head has no part.
    """

    mixes = "n parallel streams"
    conversion = Conversion(eps=True)
    streams: int

    def open(self, x: Tensor, past: Past = None) -> Tensor:
        return copies(x, self.streams)

    def write(self, H: Tensor, site: Site, read: Read, y: Tensor) -> Tensor:
        rest, weights = read.carry
        return written(rest, weights, y)

    def sources(self, site: Site) -> tuple[str, ...]:
        return () if site.kind == "head" else names(self.streams)

    def routing(self, H: Tensor, site: Site) -> Routing | None:
        if site.kind == "head":
            return None
        weights, *_ = self.part(site)(H)
        return mixture(H, weights)


def written(rest: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """rest + w' y."""
    return ops.remix(weights.to(y.dtype)[..., None, :], y[..., None, :], onto=rest)
