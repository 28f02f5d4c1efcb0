"""Hyper-Connections: n parallel streams that every sublayer reads, remixes and writes with learned weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Norm, Read, Start
from residua.streams._parallel import Dynamic, ParallelStream, home
from residua.streams._parts import constant, diagonal, marked, positive


class Wiring(Dynamic):
    """A_m (read), A_r (remix) and B (write) of one site; `dynamic` adds s tanh(layernorm(H) W) to each."""

    read: Tensor  # only if `reads`
    remix: Tensor
    write: Tensor

    def __init__(self, width: int, streams: int, site: Site, dynamic: bool) -> None:
        super().__init__()
        self.home, self.streams, self.reads = home(streams, site), streams, site.index > 0 and streams > 1
        if self.reads:  # equal streams read alike, whatever the weights: the first site has none
            self.add("read", (streams,), marked(1.0, self.home))
        self.add("remix", (streams, streams), diagonal(1.0))
        self.add("write", (streams,), constant(1.0))
        self.dynamic = dynamic
        if dynamic:
            self.add_dynamic(width, streams + self.reads)

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """read [b t s], remix [b t s s] and write [b t s]."""
        static = (
            self.read
            if self.reads
            else torch.eye(self.streams, dtype=self.remix.dtype, device=self.remix.device)[self.home]
        )
        alpha = torch.cat([static[:, None], self.remix], 1).expand(*H.shape[:2], -1, -1)
        beta = self.write.expand(*H.shape[:2], -1)
        if self.dynamic:
            moved, write = self.moved(H)
            alpha = alpha + (moved if self.reads else F.pad(moved, (1, 0)))
            beta = beta + write
        return alpha[..., 0], alpha[..., 1:], beta


@register("hyper")
class Hyper(ParallelStream):
    """x = A_m' H; H <- A_r' H + B' f(norm(x)) over n streams H [n, d]; the embedding is copied, the head sums.

    Static weights start as A_m = the site's turn among the streams, A_r = I, B = 1: n equal copies of the standard
    stream, whose sum the final norm rescales. dynamic=true (the paper's DHC, and the default) adds
    s tanh(layernorm(H) W) to each, W = 0 and s = 0.01 at the start.

    The first site reads n equal copies, so its A_m could only scale what the norm rescales, and it is not built;
    the same holds for every site where streams=1. The paper also rescales the output projections' init by
    sqrt(n) and decays the dynamic weights: both belong to a recipe, and neither is done here.
    """

    paper = "arXiv 2409.19606"
    cases = ("", "dynamic=false", "streams=2", "streams=1,dynamic=false", "streams=1")

    def __init__(self, plan: Plan, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(plan)
        positive(self.name, streams=streams)
        self.streams = streams
        self.each(lambda site: None if site.kind == "head" else Wiring(plan.width, streams, site, dynamic))

    @property
    def starts(self) -> Start:
        return "standard" if self.streams == 1 else "eps"

    def gates(self, H: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        return {"s_alpha": part.s_alpha, "s_beta": part.s_beta} if part is not None and part.dynamic else {}

    def read(self, H: Tensor, site: Site, norm: Norm) -> Read:
        if site.kind == "head":
            return Read(norm(H.sum(-2)))
        read, remix, write = self.part(site)(H)
        x, rest = ops.read_remix(read, remix, H)
        return Read(norm(x), carry=(rest, write))
