"""Manifold-constrained Hyper-Connections: the remix of the streams is kept doubly stochastic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from residua import ops
from residua.ops.norm import accumulator
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Norm, Read, Start
from residua.streams._parallel import ParallelStream, home
from residua.streams._parts import Fill, Part, constant, diagonal, marked, normal, positive

EPS = 1e-6
"""Of the RMS norm over all streams."""


class Affine(Part):
    """alpha rmsnorm(vec H) phi + b, for one of pre (n), post (n) and res (n x n)."""

    phi: Tensor
    bias: Tensor
    alpha: Tensor

    def __init__(self, inputs: int, shape: tuple[int, ...], bias: Fill, phi: Fill) -> None:
        super().__init__()
        self.shape = shape
        self.add("phi", (inputs, math.prod(shape)), phi)
        self.add("bias", shape, bias)
        self.add("alpha", (1,), constant(0.01))

    def forward(self, flat: Tensor) -> Tensor:
        return self.alpha * (flat @ self.phi).unflatten(-1, self.shape) + self.bias


class Mappings(nn.Module):
    """H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn of their mappings.

    The first site has n equal streams: pre only scales and res does nothing. After the last, the head sums the
    streams, which a doubly stochastic H_res cannot change (20 rounds of Sinkhorn leave it a column error of 1e-3 to
    1e-2, so the paper's last H_res is not quite nothing). What could not learn is not built.
    """

    def __init__(self, plan: Plan, streams: int, site: Site, iterations: int, init: str) -> None:
        super().__init__()
        self.streams, self.iterations = streams, iterations
        inputs, a6 = streams * plan.width, init == "a6"
        zero, phi = constant(0.0), constant(0.0) if a6 else normal(0.02)
        own = marked(3.0, home(streams, site), -3.0) if a6 else zero
        kept = diagonal(3.0, -3.0) if a6 else zero  # a stream keeps 99 % of itself
        self.pre = Affine(inputs, (streams,), own, phi) if site.index else None
        self.post = Affine(inputs, (streams,), zero, phi)
        inside = 0 < site.index < len(plan.sites) - 1
        self.res = Affine(inputs, (streams, streams), kept, phi) if inside else None

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [b t n], post [b t n] and res [b t n n]."""
        flat = ops.rms_norm(H.flatten(-2).to(accumulator(H.dtype)), EPS).to(self.post.phi.dtype)
        rows = H.shape[:2]
        pre = (
            self.pre(flat).sigmoid() if self.pre is not None else flat.new_full((*rows, self.streams), 1 / self.streams)
        )
        post = 2 * self.post(flat).sigmoid()
        if self.res is not None:
            return pre, post, ops.sinkhorn(self.res(flat), iterations=self.iterations)
        return pre, post, torch.eye(self.streams, dtype=flat.dtype, device=flat.device).expand(*rows, -1, -1)


@register("mhc")
class MHC(ParallelStream):
    """x = H_pre H; H <- H_res H + H_post' f(norm(x)), H_res doubly stochastic; the embedding is copied, the head sums.

    pre, post and res are affine in rmsnorm(vec H), through sigmoid, 2 sigmoid and Sinkhorn (columns then rows,
    `iterations` rounds, so that rows are exact). Products of H_res keep the mean of the streams, up to column errors.

    init   a6: phi = 0, b_pre = +3 on the site's own stream and -3 elsewhere, b_res = 6 I - 3 (published with the
           conference version); random: phi ~ N(0, 0.02^2), biases 0. Both tell the streams apart; with phi = 0 and
           b = 0 they would stay equal for ever, so that start is not offered.
    """

    paper = "arXiv 2512.24880"
    cases = ("", "streams=2", "init=random,iterations=8")

    def __init__(
        self,
        plan: Plan,
        *,
        streams: int = 4,
        iterations: int = 20,
        init: Literal["a6", "random"] = "a6",
    ) -> None:
        super().__init__(plan)
        if streams < 2:
            raise ValueError(f"mhc: streams={streams}: with one stream H_res is 1 and H_pre only scales; use standard")
        positive(self.name, iterations=iterations)
        self.streams = streams
        self.each(lambda site: None if site.kind == "head" else Mappings(plan, streams, site, iterations, init))

    @property
    def starts(self) -> Start:
        return "eps" if self.options["init"] == "a6" else "no"

    def gates(self, H: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        mappings = {} if part is None else {name: getattr(part, name) for name in ("pre", "post", "res")}
        return {f"alpha_{name}": mapping.alpha for name, mapping in mappings.items() if mapping is not None}

    def read(self, H: Tensor, site: Site, norm: Norm) -> Read:
        if site.kind == "head":
            return Read(norm(H.sum(-2)))
        pre, post, res = self.part(site)(H)
        (x,) = ops.remix(pre[..., None], H).unbind(-2)
        return Read(norm(x), carry=(ops.remix(res.transpose(-1, -2), H), post))
