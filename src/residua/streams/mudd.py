"""MUDDFormer: token-dependent dense connections, one mixture each for q, k, v and the residual."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Norm, Read, Routing
from residua.streams._layered import Dense, DenseStream, T
from residua.streams._parts import Part, constant, normal, positive, recent

EPS = 1e-6
"""Of the norms: the post-norm's slope at zero, its gain 1e-3 over sqrt(EPS), is then exactly 1."""

DEEP = 24
"""Blocks from which `prepost=auto` is `all`: without, training broke at 48 and was unsteady at 24 (findings.md)."""


class Dynamic(Part):
    """A = gelu(rmsnorm(x) W1) W2 + a: the weights of C mixtures over n sources, for every token."""

    W1: Tensor
    W2: Tensor
    a: Tensor
    post: Tensor  # only with prepost

    def __init__(self, width: int, lanes: int, sources: int, hidden: int, prepost: str) -> None:
        super().__init__()
        self.lanes, self.sources = lanes, sources
        self.add("W1", (width, hidden), normal(width**-0.5))
        self.add("W2", (hidden, lanes * sources), constant(0.0))
        self.add("a", (lanes, sources), constant(0.0) if prepost != "none" else recent(1.0))
        if prepost != "none":
            self.add("post", (lanes if prepost == "all" else 1, width), constant(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        """The weights as [lane n b t], in the accumulation type: bfloat16 is too coarse for them."""
        wide = accumulator(x.dtype)
        hidden = F.gelu(ops.rms_norm(x.to(wide), EPS) @ self.W1.to(wide))
        weights = (hidden @ self.W2.to(wide)).unflatten(-1, (self.lanes, self.sources))
        return (weights + self.a.to(wide)).permute(2, 3, 0, 1)

    def scale(self, mixed: Tensor) -> Tensor:
        """gain / rms of every lane that has a post-norm, 1 of the others, as [lane b t d]."""
        wide = mixed.to(accumulator(mixed.dtype))
        normed = self.post[:, None, None] * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        plain = torch.ones_like(wide[: len(mixed) - len(self.post)])
        return torch.cat([plain, normed[len(plain) :]])


@register("mudd")
class MUDD(DenseStream):
    """x^c = sum_j A^c_j(x_i) x_j for c in q, k, v, r; h = x^r + attn(q, k, v); A = gelu(rmsnorm(x_i) W1) W2 + a.

    Sources are the states after each block; the newest decides the weights, which may be negative. W2 = 0 and a
    one-hot make the design the standard Transformer at the start. A block that opens with a sublayer of one input
    has two mixtures, x and r; the head has one, with a hidden layer four times as wide.

    prepost    PrePostDANorm for deep, narrow models: sources are RMS-normalised, and x^c = x_i + post(sum), post a
               norm with gain from 1e-3. `all` is the paper; `r`, as in the released code, norms that lane alone;
               `auto` is `all` from 24 blocks on and `none` below. (a then starts at 0; the norm of the sources has
               no gain.)
    window     keep the embedding and the states of the last `window` blocks (the paper's SWn).
    dilation, period   as in DenseFormer: every k-th source, after every p-th block; a window then counts those.
    hidden     paper: lanes x sources; released: that, rounded up past the next multiple of 64.
    """

    paper = "arXiv 2502.12170"
    cases = (
        "",
        "prepost=all",
        "prepost=r",
        "window=1",
        "dilation=2,period=2",
        "prepost=none,hidden=released",
        "window=2,dilation=2,prepost=r",
    )

    def __init__(
        self,
        plan: Plan,
        *,
        prepost: Literal["auto", "none", "all", "r"] = "auto",
        window: int | None = None,
        dilation: int = 1,
        period: int = 1,
        hidden: Literal["paper", "released"] = "paper",
    ) -> None:
        super().__init__(plan)
        positive(self.name, dilation=dilation, period=period, window=1 if window is None else window)
        normed = ("all" if plan.depth >= DEEP else "none") if prepost == "auto" else prepost
        self.prepost, self.window, self.dilation, self.period = normed != "none", window, dilation, period

        def make(site: Site) -> Dynamic | None:
            count = len(self.sources(site))
            if not count:
                return None
            lanes = 1 if site.kind == "head" else site.lanes + 1
            wide = 4 * count if site.kind == "head" else lanes * count
            return Dynamic(plan.width, lanes, count, wide if hidden == "paper" else (wide // 64 + 1) * 64, normed)

        self.each(make)

    def feeds(self, site: Site) -> int:
        return 3 if self.part(site) is not None and site.lanes == 3 else 1

    def read(self, s: Dense, site: Site, norm: Norm) -> Read:
        part = self.part(site)
        if part is None:
            return Read(norm(s.h), carry=s.h)
        mixed = ops.mix(part(s.h), self.taken(s.sources))
        if self.prepost:
            mixed = s.h + (part.scale(mixed) * mixed).to(s.h.dtype)
        *lanes, r = mixed
        return Read(norm(*lanes or (r,)), carry=r)

    def routing(self, s: Dense, site: Site) -> Routing | None:
        part = self.part(site)
        if part is None:
            return None
        values, weights = self.taken(s.sources), part(s.h)
        read = slice(None) if site.kind == "head" else slice(-1)  # r is carried to the write, not read
        if not self.prepost:
            return Routing(values, weights[read, ..., None])
        return Routing(values, weights[read, ..., None], s.h, part.scale(ops.mix(weights, values))[read])

    def source(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, EPS) if self.prepost else x

    def taken(self, sources: tuple[T, ...]) -> tuple[T, ...]:
        """In a window the last of them, and the embedding if it is among them."""
        taken = super().taken(sources)
        if self.window is None or len(taken) <= self.window:
            return taken
        embed = sources[:1] if (len(sources) - 1) % self.dilation == 0 else ()
        return (*embed, *taken[-self.window :])

    def kept(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return sources if self.dilation > 1 else self.taken(sources)
