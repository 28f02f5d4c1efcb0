"""Frac-Connections: the width is split into fractions, which sublayers mix as Hyper-Connections mix whole streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parallel import Dynamic
from residua.streams._parts import constant, diagonal, positive


class Wiring(Dynamic):
    """Y (read), A (remix) and B (write) of one site; `dynamic` adds s tanh(layernorm(H) W) to each."""

    read: Tensor  # only with two fractions or more
    remix: Tensor
    write: Tensor

    def __init__(self, width: int, fractions: int, dynamic: bool) -> None:
        super().__init__()
        self.fractions, self.reads, self.dynamic = fractions, fractions > 1, dynamic
        if self.reads:  # one fraction can only be scaled, which the norm undoes
            self.add("read", (fractions, fractions), diagonal(1.0))
        self.add("remix", (fractions, fractions), diagonal(1.0))
        self.add("write", (fractions,), constant(1.0))
        if dynamic:
            self.add_dynamic(width, fractions * (1 + self.reads))

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """[read | remix] [b t m 2m] and write [b t m]."""
        read = self.read if self.reads else torch.eye(self.fractions, dtype=self.remix.dtype, device=self.remix.device)
        alpha = torch.cat([read, self.remix], 1).expand(*H.shape[:2], -1, -1)
        beta = self.write.expand(*H.shape[:2], -1)
        if self.dynamic:
            moved, write = self.moved(H)
            alpha = alpha + (moved if self.reads else F.pad(moved, (self.fractions, 0)))
            beta = beta + write
        return alpha, beta


@register("frac")
class Frac(Stream[Tensor]):
    """x = concat(Y' H), H_k <- (A' H)_k + B_k f(norm(x))_k over m fractions H [m, d/m] of one stream.

    A fraction is a slice of the width: nothing is copied, and the state is as wide as the standard one. Static weights
    start as Y = A = I and B = 1, the standard network to the last bit. dynamic=true (the default, as in `hyper`) adds
    s tanh(layernorm(H_i) W) to row i of each, layernorm over d/m, W = 0 and s = 0.01 at the start. fractions=1 is
    `hyper:streams=1`, whose Y could only scale what the norm rescales and is not built.

    The paper keeps weight decay off the static weights: a matter of the recipe, and not done here. A public package has
    an option of this name (`num_fracs`) that is another method, see the decisions.
    """

    paper = "arXiv 2503.14125"
    mixes = "m fractions of the width"
    cases = ("", "dynamic=false", "fractions=2", "fractions=1", "fractions=1,dynamic=false")
    conversion = Conversion(exact=True)
    starts: Start = "standard"

    def __init__(self, plan: Plan, *, fractions: int = 4, dynamic: bool = True) -> None:
        super().__init__(plan)
        positive(self.name, fractions=fractions)
        if plan.width % fractions:
            raise ValueError(f"frac: fractions={fractions} does not divide the width {plan.width}")
        self.fractions = fractions
        self.each(lambda site: None if site.kind == "head" else Wiring(plan.width // fractions, fractions, dynamic))

    def open(self, x: Tensor, past: Past = None) -> Tensor:
        return x

    def read(self, h: Tensor, site: Site, norm: Norm) -> Read:
        if site.kind == "head":
            return Read(norm(h))
        H = self._split(h)
        weights, write = self.part(site)(H)
        x, rest = ops.remix(weights, H).split(self.fractions, -2)
        return Read(norm(x.flatten(-2)), carry=(rest, write))

    def write(self, h: Tensor, site: Site, read: Read, y: Tensor) -> Tensor:
        rest, write = read.carry
        return (rest + write.to(y.dtype)[..., None] * self._split(y)).flatten(-2)

    def sources(self, site: Site) -> tuple[str, ...]:
        return () if site.kind == "head" else tuple(f"fraction{i}" for i in range(self.fractions))

    def routing(self, h: Tensor, site: Site) -> Routing | None:
        if site.kind == "head":
            return None
        H = self._split(h)
        weights, _ = self.part(site)(H)
        # slice k of the input mixes all fractions: each stands in every slice, and a slice is a group of weights
        values = tuple(one.repeat(1, 1, self.fractions) for one in H.unbind(-2))
        return Routing(values, weights[..., : self.fractions].movedim(2, 0)[None])

    def gates(self, h: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        return {"s_alpha": part.s_alpha, "s_beta": part.s_beta} if part is not None and part.dynamic else {}

    def _split(self, h: Tensor) -> Tensor:
        """[b t d] as fractions [b t m d/m]."""
        return h.unflatten(-1, (self.fractions, -1))
