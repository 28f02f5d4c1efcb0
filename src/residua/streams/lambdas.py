"""Lambdas: learned numbers scale the stream, bring the embedding back and take the middle of the network out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from residua import ops
from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Routing, Start, Stream
from residua.streams._parts import Part, block_names, constant, uniform

EPS = torch.finfo(torch.float32).eps
"""Of the norm of the embedding."""
SMEARED = 24
"""Channels that the gate of `smear` sees."""


class Lambda(NamedTuple):
    """The stream and what later sites add to it."""

    x: Tensor
    embed: Tensor
    skips: tuple[Tensor, ...] = ()
    """Outputs of early blocks that late ones have not taken yet, newest last."""
    middle: tuple[Tensor, ...] = ()
    """The state that the head takes away: none or one."""
    tail: tuple[Tensor, ...] = ()
    """With `smear`, the last token's embedding [b 1 d]."""


class Scales(Part):
    """The numbers of one site."""

    resid: Tensor
    x0: Tensor
    post: Tensor
    skip: Tensor
    backout: Tensor

    def __init__(self, **starts: float) -> None:
        super().__init__()
        for name, start in starts.items():
            self.add(name, (1,), constant(start))


class Smear(Part):
    """lambda sigmoid(W x[:24]), the share of the token before."""

    weight: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.add("weight", (min(SMEARED, width),), uniform(0.0, 0.02))
        self.add("scale", (1,), constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        logit = x[..., : len(self.weight)].to(self.weight.dtype) @ self.weight
        return self.scale * logit.sigmoid()


@register("lambdas")
class Lambdas(Stream[Lambda]):
    """x <- r x + l x0 before every block, x <- x + f(norm(x)) inside; the head reads x - b m, m the middle state.

    x0 is the embedding as the stream begins, m the state after block L // 2, and r, l and b are learned numbers, r and
    l a block. As in nanochat with init=released; with the default start, r = 1, l = 0 and b = 0, the network is the
    standard one to the last bit.

    init      identity: as above. released, each=block: r falls from 1.15 to 1.05 and l from 0.20 to 0.05 along the
              depth, b = 0.2 (nanochat); each=sublayer: r = sqrt(1.1), l = 0, b = 0.5 (modded-nanogpt).
    each      sublayer: x <- r x + p f(norm(x)) at every sublayer, p = 1 at the start, with l x0 added by the first of a
              block, as in modded-nanogpt.
    backout   whether there is a b. A plan whose middle block is its last (L < 3, or `middle`) has none: it would only
              scale what the head's norm rescales.
    middle    the block after which m is kept, counted from 0; L // 2 by default (modded-nanogpt: 7 of 11).
    skips     unet: the first L // 2 blocks push what they made, and a late block i adds w times the output of block
              L - 1 - i before its lambdas; w = 1 at the start, which is not the standard network (modded-nanogpt until
              2025; its later gate on one skip is not here).
    normed    x = e / rms(e), without a gain, in the place of e (nanochat; eps is that of float32).
    smear     x_t <- x_t + s sigmoid(W x_t[:24]) x_{t-1} before x0 is taken, s = 0 at the start (nanochat); decoding
              keeps one token as `past`.

    In the first block x is x0, so that r and l do the same there; both are kept, as in the code.
    """

    paper = "nanochat, modded-nanogpt (code)"
    mixes = "the newest state, the embedding and states of earlier blocks"
    released_in: ClassVar = {"nanochat": "lambdas:init=released,normed=true,smear=true"}
    cases = (
        "",
        "init=released,normed=true",
        "smear=true",
        "each=sublayer",
        "each=sublayer,init=released,middle=0,normed=true",
        "skips=unet,backout=false",
        "skips=unet,each=sublayer,smear=true,normed=true",
    )
    conversion = Conversion(exact=True)

    def __init__(
        self,
        plan: Plan,
        *,
        init: Literal["identity", "released"] = "identity",
        each: Literal["block", "sublayer"] = "block",
        backout: bool = True,
        middle: int | None = None,
        skips: Literal["none", "unet"] = "none",
        normed: bool = False,
        smear: bool = False,
    ) -> None:
        super().__init__(plan)
        depth = plan.depth
        if middle is not None and not (backout and 0 <= middle < depth):
            raise ValueError(
                f"lambdas: middle={middle} must be 0..{depth - 1}, a block of this plan, with backout=true"
            )
        self.released, self.by_block, self.normed = init == "released", each == "block", normed
        self.middle = depth // 2 if middle is None else middle
        self.backs_out = backout and self.middle < depth - 1
        self.pushing = depth // 2 if skips == "unet" else 0
        self.each(self._scales)
        self.smear = Smear(plan.width) if smear else None

    def _scales(self, site: Site) -> Scales | None:
        if site.kind == "head":
            return (
                Scales(backout=0.0 if not self.released else 0.2 if self.by_block else 0.5) if self.backs_out else None
            )
        starts: dict[str, float] = {}
        along = site.layer / max(self.plan.depth - 1, 1)
        if not self.by_block:
            starts |= {"resid": 1.1**0.5 if self.released else 1.0, "post": 1.0}
        elif site.first:
            starts["resid"] = 1.15 - 0.10 * along if self.released else 1.0
        if site.first:
            starts["x0"] = 0.20 - 0.15 * along if self.released and self.by_block else 0.0
            if self._pops(site):
                starts["skip"] = 1.0
        return Scales(**starts) if starts else None

    @property
    def starts(self) -> Start:
        return "no" if self.released or self.pushing or self.normed else "standard"

    @property
    def mixes_tokens(self) -> bool:
        return self.smear is not None

    def open(self, x: Tensor, past: Past = None) -> Lambda:
        if self.normed:
            x = ops.rms_norm(x, EPS)
        if self.smear is None:
            return Lambda(x, x)
        (before,) = past or (x.new_zeros(x.shape[0], 1, x.shape[2]),)
        shifted = torch.cat([before, x[:, :-1]], 1)
        smeared = x + (self.smear(x)[..., None] * shifted).to(x.dtype)
        return Lambda(smeared, smeared, tail=(ops.conv_tail(x, before),))

    def read(self, s: Lambda, site: Site, norm: Norm) -> Read:
        part = self.part(site)
        if site.kind == "head":
            return Read(norm(s.x if part is None else (s.x - part.backout * s.middle[0]).to(s.x.dtype)))
        x = s.x
        if self._pops(site):
            x = x + (part.skip * s.skips[-1]).to(x.dtype)
        if site.first and self.by_block:
            x = (part.resid * x + part.x0 * s.embed).to(x.dtype)
        return Read(norm(x), carry=x)

    def write(self, s: Lambda, site: Site, read: Read, y: Tensor) -> Lambda:
        part, x = self.part(site), read.carry
        if self.by_block:
            x = x + y
        else:
            x = part.resid * x + part.post * y
            x = (x + part.x0 * s.embed if site.first else x).to(y.dtype)
        skips = s.skips[:-1] if self._pops(site) else s.skips
        if site.last and site.layer < self.pushing:
            skips = (*skips, x)
        kept = self.backs_out and site.last and site.layer == self.middle
        return Lambda(x, s.embed, skips, (x,) if kept else s.middle, s.tail)

    def past(self, s: Lambda) -> Past:
        return s.tail or None

    def gates(self, s: Lambda, site: Site, read: Read) -> Mapping[str, Tensor]:
        part = self.part(site)
        return {} if part is None else dict(part.named_parameters())

    def sources(self, site: Site) -> tuple[str, ...]:
        if not site.first or self.part(site) is None:
            return ()
        if site.kind == "head":
            return self._output(self.middle), self._output(site.layer - 1)
        if site.layer == 0:
            return ("embed",) if self.by_block else ()
        embed = ("embed",) if self.by_block else ()
        skip = (self._output(self._popped(site)),) if self._apart(site) else ()
        mixed = (*embed, *skip, self._output(site.layer - 1))
        return mixed if len(mixed) > 1 or self._pops(site) else ()

    def routing(self, s: Lambda, site: Site) -> Routing | None:
        if not self.sources(site):
            return None
        part = self.part(site)
        one = torch.ones_like(next(part.parameters()))
        if site.kind == "head":
            return Routing.static((s.middle[0], s.x), torch.cat([-part.backout, one]))
        resid, x0 = (part.resid, part.x0) if self.by_block else (one, 0 * one)
        if site.layer == 0:
            return Routing.static((s.x,), resid + x0)
        found = [(s.embed, x0)] if self.by_block else []
        if self._apart(site):
            found.append((s.skips[-1], resid * part.skip))
        newest = resid * (1 + part.skip) if self._pops(site) and not self._apart(site) else resid
        values, weights = zip(*found, (s.x, newest), strict=True)
        return Routing.static(values, torch.cat(weights))

    def _output(self, layer: int) -> str:
        """The name of what a block made."""
        return block_names(self.plan, layer + 1)[-1]

    def _popped(self, site: Site) -> int:
        """The block whose output a site takes back."""
        return self.plan.depth - 1 - site.layer

    def _pops(self, site: Site) -> bool:
        return site.kind != "head" and site.first and self._popped(site) < self.pushing

    def _apart(self, site: Site) -> bool:
        """Whether it is not the newest state, which the block after the middle of an even depth takes twice."""
        return self._pops(site) and self._popped(site) != site.layer - 1
