"""LAuReL: the shortcut is a learned linear map, the identity plus a product of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Start, Stream
from residua.streams._lowrank import ShippedLaurel
from residua.streams._parts import Part, constant


def _orthogonal(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Channel i feeds coordinate i mod r alone, with 1 / sqrt(r d)."""
    rank, width = tensor.shape
    channels = torch.arange(width, device=tensor.device)
    tensor.zero_()[channels % rank, channels] = (rank * width) ** -0.5


class Shortcut(Part):
    """x + B A x, and the weights of it and of the sublayer."""

    down: Tensor  # A; this and the next only with a rank
    up: Tensor
    weights: Tensor  # alpha and beta, or their logits; only where they are learned

    def __init__(self, width: int, rank: int, weights: str) -> None:
        super().__init__()
        self.rank, self.kind = rank, weights
        if rank:
            self.add("down", (rank, width), _orthogonal)
            self.add("up", (width, rank), constant(0.0))
        if weights != "none":
            self.add("weights", (2,), constant(0.0 if weights == "softmax" else 1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """alpha y + beta (x + B A x)."""
        kept, (alpha, beta) = x, self.shares()
        if self.kind != "none":
            y, kept = alpha * y, beta * kept
        if self.rank:
            low = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
            return (kept + y + (low if self.kind == "none" else beta * low)).to(x.dtype)
        return (kept + y).to(x.dtype)

    def shares(self) -> tuple[Tensor | float, Tensor | float]:
        """alpha and beta."""
        if self.kind == "none":
            return 1.0, 1.0
        alpha, beta = self.weights.softmax(0) if self.kind == "softmax" else self.weights
        return alpha, beta

    def share(self, x: Tensor) -> Tensor:
        """rms(B A x) / rms(x), a token."""
        low = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)
        return low.square().mean(-1).sqrt() / x.to(low.dtype).square().mean(-1).sqrt()


@register("laurel")
class Laurel(Stream[Tensor]):
    """x <- alpha f(norm(x)) + beta (x + B A x), A of r x d and B of d x r: LAuReL-RW, -LR and both.

    A starts with 1 / sqrt(r d) where channel i meets coordinate i mod r and with zeros elsewhere, B at zero, as in the
    paper's language models: the standard network to the last bit.

    rank      r, 4 as in the paper's model of 1B parameters (64 in that of 4B, and in Gemma 3n); 0 for no product.
    weights   none: alpha = beta = 1 (LAuReL-LR). free: two learned numbers that start at 1 (LAuReL-RW). softmax: the
              softmax of two logits that start at 0, since the paper found that they must not grow without a bound;
              alpha = beta = 1/2 at the start, which is not the standard network.
    form      gemma3n: x <- (x + f(u) + u + rmsnorm(W_r W_l u)) / sqrt(2) at every attention, u = norm(x), and
              x <- x + f(norm(x)) elsewhere. Not the paper's: with W_r = 0 the term u remains, and nothing is the
              standard network. Gemma 3n has it inside of AltUp and with norms on both sides: `altup:laurel=64` in
              the layout attn:norm=both,mlp:norm=both.
    eps       of the norm in form=gemma3n.

    The paper's form over previous activations (LAuReL-PA), which it tried on images alone, is not here.
    """

    paper = "arXiv 2411.07501"
    mixes = "nothing: the shortcut is a linear map"
    cases = (
        "",
        "weights=free,rank=2",
        "weights=softmax",
        "rank=0,weights=softmax",
        "form=gemma3n",
        "form=gemma3n,eps=1e-5",
    )
    conversion = Conversion(exact=True)

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int = 4,
        weights: Literal["none", "free", "softmax"] = "none",
        form: Literal["paper", "gemma3n"] = "paper",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        self.shipped, self.halves = form == "gemma3n", weights == "softmax"
        if not 0 <= rank <= plan.width:
            raise ValueError(f"laurel: rank={rank} must be 0..{plan.width}, the width of this plan")
        if self.shipped and (weights != "none" or rank == 0):
            raise ValueError("laurel: form=gemma3n has a product of some rank and no weights; drop weights and rank=0")
        if not rank and weights == "none":
            raise ValueError("laurel: rank=0 without weights leaves nothing of it; use standard")
        if eps != 1e-6 and not self.shipped:
            raise ValueError("laurel: eps is that of a norm which form=gemma3n alone has")

        def make(site: Site) -> nn.Module | None:
            if site.kind == "head" or (self.shipped and site.lanes != 3):
                return None
            return ShippedLaurel(plan.width, rank, eps) if self.shipped else Shortcut(plan.width, rank, weights)

        self.each(make)

    @property
    def starts(self) -> Start:
        return "no" if self.halves or (self.shipped and len(self.at)) else "standard"

    def open(self, x: Tensor, past: Past = None) -> Tensor:
        return x

    def read(self, x: Tensor, site: Site, norm: Norm) -> Read:
        return Read(norm(x), carry=x)

    def write(self, x: Tensor, site: Site, read: Read, y: Tensor) -> Tensor:
        part, x = self.part(site), read.carry
        if part is None:
            return x + y
        return part.write(x, read.lanes[0], y) if self.shipped else part(x, y)

    def gates(self, x: Tensor, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        if part is None or self.shipped:
            return {}
        found = {"low_rank": part.share(read.carry)} if part.rank else {}
        if part.kind != "none":
            found["alpha"], found["beta"] = part.shares()
        return found
