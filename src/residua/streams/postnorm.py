"""Norms of the stream itself: post-norm, and what was made of it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from residua.plan import Plan, Site
from residua.registry import register
from residua.stream import Conversion, Norm, Past, Read, Start, Stream
from residua.streams._norms import Gain
from residua.streams._parts import belongs


class Normed(NamedTuple):
    """The stream that is normalised and, beside it in two forms, the sum that never is."""

    x: Tensor
    total: tuple[Tensor, ...] = ()
    """None or one."""


class Rule(NamedTuple):
    """What one sublayer does to x."""

    norm: bool
    """It reads through the norm before it."""
    keeps: bool
    """What it read is added to its output as it was before that norm."""
    closes: bool
    """What it wrote is normalised."""


PRE = Rule(norm=True, keeps=True, closes=False)
"""x + f(N(x))"""
POST = Rule(norm=False, keeps=True, closes=True)
"""N(x + f(x))"""
BOTH = Rule(norm=True, keeps=True, closes=True)
"""N(x + f(N(x)))"""
RAW = Rule(norm=False, keeps=True, closes=False)
"""x + f(x)"""
MOVED = Rule(norm=True, keeps=False, closes=False)
"""N(x) + f(N(x))"""

TWO = ("resi_dual", "siamese")
"""The forms that also keep the sum."""


@register("postnorm")
class PostNorm(Stream[Normed]):
    """x <- N(alpha x + f(x)): the stream is normalised where it is written, by a gain of the design.

    form    post: alpha = 1, the original Transformer.
            deepnorm: alpha = (number of sublayers)^(1/4). The paper also starts W_V, W_O and the MLP at
            (4 * number of sublayers)^(-1/4) times their usual size (L blocks of attn,mlp: (2L)^(1/4), (8L)^(-1/4)); the
            start of sublayers is the backbone's, which divides what writes by sqrt(number of sublayers) instead.
            keel: N(alpha x + f(norm(x))), alpha = number of sublayers. Second-hand: from re-implementations.
            resi_dual: o = f(x); y <- y + o; x <- N(x + o); the head reads x + norm(y) (ResiDual).
            siamese: o = f(x + norm(y)); y <- y + o; x <- N(x + o); the head reads x + norm(y) (SiameseNorm's paper).
            hybrid: attention x <- x + f(x), every other sublayer x <- norm(x) + f(norm(x)); write
            attn:heads_norm=qkv in the layout, which is where HybridNorm normalises attention.
            mixln: N(alpha x + f(x)) in the first `share` of the blocks, x + f(norm(x)) in the rest (Mix-LN).
    alpha   of deepnorm, keel and mixln (1; the released code of Mix-LN has 2.828427).
    share   of mixln: 0.25.
    first   of hybrid: same, or pre for a first block with x + f(norm(x)) (HybridNorm*).
    embed   raw: the stream opens with the embedding; normed: with N(embedding), as BERT does and `standard:norm=post`.
    eps     of every N.

    N is a norm with a gain of the design, `norm` the backbone's; where a sublayer reads x as it is, it has none.
    """

    paper = (
        "arXiv 1706.03762 (post), 2203.00555 (DeepNorm), 2601.19895 (KEEL), 2304.14802 (ResiDual), "
        "2602.08064 (SiameseNorm), 2503.04598 (HybridNorm), 2412.13795 (Mix-LN)"
    )
    mixes = "nothing: the running sum, normalised"
    cases = (
        "",
        "embed=normed,eps=1e-5",
        "form=deepnorm",
        "form=keel",
        "form=keel,alpha=4.0",
        "form=resi_dual",
        "form=siamese",
        "form=hybrid",
        "form=hybrid,first=pre,embed=normed",
        "form=hybrid,first=same",
        "form=mixln",
        "form=mixln,share=1.0,alpha=2.828427",
    )
    conversion = Conversion(
        refusal="it normalises the stream, which a pre-norm network never does, so that no setting of its weights is "
        "the base network; train it from scratch"
    )
    starts: Start = "no"

    def __init__(
        self,
        plan: Plan,
        *,
        form: Literal["post", "deepnorm", "keel", "resi_dual", "siamese", "hybrid", "mixln"] = "post",
        alpha: float | None = None,
        share: float | None = None,
        first: Literal["same", "pre"] | None = None,
        embed: Literal["raw", "normed"] = "raw",
        eps: float | None = None,
    ) -> None:
        super().__init__(plan)
        belongs(self.name, form, "alpha", alpha, "deepnorm", "keel", "mixln")
        belongs(self.name, form, "share", share, "mixln")
        belongs(self.name, form, "first", first, "hybrid")
        if alpha is not None and alpha <= 0:
            raise ValueError(f"postnorm: alpha must be above 0, not {alpha}")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"postnorm: share is a part of the blocks, above 0 and at most 1, not {share}")
        if eps is not None and form == "hybrid" and embed == "raw":
            raise ValueError("postnorm: eps has no effect with form=hybrid and embed=raw, which have no norm; drop it")
        eps = 1e-6 if eps is None else eps
        self.form, self.two = form, form in TWO
        post_blocks = (0.25 if share is None else share) * plan.depth
        self.rules = [self._rule(site, post_blocks, first == "pre") for site in plan.sites]
        default = {"deepnorm": len(plan.sites) ** 0.25, "keel": float(len(plan.sites))}.get(form, 1.0)
        self.alpha = default if alpha is None else alpha
        self.embed = Gain(plan.width, eps) if embed == "normed" else None
        self.each(lambda site: Gain(plan.width, eps) if site.kind != "head" and self.rules[site.index].closes else None)

    def _rule(self, site: Site, post_blocks: float, pre_first: bool) -> Rule:
        if self.form in ("keel", "siamese"):
            return BOTH
        if self.form == "hybrid":
            if pre_first and site.layer == 0:
                return PRE
            return RAW if site.lanes == 3 else MOVED
        return PRE if self.form == "mixln" and site.layer >= post_blocks else POST

    def takes_norm(self, site: Site) -> bool:
        if site.kind == "head":  # what the last write has normalised is read as it is
            return self.two or not self.rules[-1].closes
        return self.rules[site.index].norm

    def open(self, x: Tensor, past: Past = None) -> Normed:
        x = x if self.embed is None else self.embed(x)
        return Normed(x, (x,) if self.two else ())

    def read(self, s: Normed, site: Site, norm: Norm) -> Read:
        if not self.takes_norm(site):
            return Read((s.x,), carry=s.x)
        if self.two:
            (y,) = norm(*s.total)
            return Read((s.x + y,), carry=s.x)
        (x,) = norm(s.x)
        return Read((x,), carry=s.x if site.kind == "head" or self.rules[site.index].keeps else x)

    def write(self, s: Normed, site: Site, read: Read, y: Tensor) -> Normed:
        rule = self.rules[site.index]
        if not rule.closes:
            return Normed(read.carry + y)
        return Normed(self.part(site)(self.alpha * read.carry + y), tuple(total + y for total in s.total))
