"""ELC-BERT: every layer reads a learned convex combination of all earlier layers."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from residua import ops
from residua.plan import Plan
from residua.registry import register
from residua.stream import Conversion, Past
from residua.streams._layered import Layered, StaticLayered
from residua.streams._parts import Static, opens_block


@register("elc")
class ELC(StaticLayered):
    """x_l = sum_{i<=l} softmax(a_l)_i H_i; H_{l+1} = Att(x_l) + MLP(...); x_l is never added back.

    A layer's output holds only what its sublayers made: the skip exists through later mixtures alone. Written for
    encoders, it runs in any backbone. With another layout H is the sum of all sublayer outputs of the layer.

    variant     base: a_l is 1 on the newest entry before the softmax, whose weight is e/(e+l), far from one-hot.
                zero: a_l = 0, the mean. normalized: zero, and H passes a layer norm without gain. weighted: zero,
                and the head reads softmax(c) over all H instead of the last.
    embed       normed: H_0 is the embedding behind a layer norm without gain, as released. raw: the embedding itself.
    eps         of these layer norms; 1e-7 where not given.
    mlp_input   what follows the attention: `attn` feeds it the attention's output alone, `sum` feeds x + attention.
                The released base file does the former and the other three the latter; each is the default there.

    The paper also gives the first layer a weight over its single source, which cannot learn and is not built. Its
    attention ends in a norm of its own, which is the layout's to give: attn:norm=both,mlp.
    """

    paper = "arXiv 2311.02265"
    mixes = "layer outputs"
    conversion = Conversion(
        refusal="its layers never add what they read to what they make, so that no setting of its weights is the base "
        "network, and a gate would be another design; train it from scratch"
    )
    cases = (
        "",
        "variant=zero",
        "variant=normalized,eps=1e-6",
        "variant=weighted",
        "mlp_input=sum",
        "variant=zero,mlp_input=attn",
        "embed=raw",
        "eps=1e-5",
    )

    def __init__(
        self,
        plan: Plan,
        *,
        variant: Literal["base", "zero", "normalized", "weighted"] = "base",
        mlp_input: Literal["attn", "sum"] | None = None,
        embed: Literal["normed", "raw"] = "normed",
        eps: float | None = None,
    ) -> None:
        super().__init__(plan)
        self.normalized, self.normed = variant == "normalized", embed == "normed"
        if eps is not None and not self.normalized and not self.normed:
            raise ValueError(f"elc: eps belongs to a norm, and variant={variant} with embed=raw has none of its own")
        self.eps = 1e-7 if eps is None else eps
        self.keeps_x = (mlp_input or ("attn" if variant == "base" else "sum")) == "sum"
        newest, plain = 1.0 if variant == "base" else 0.0, None if variant == "weighted" else "head"
        self.each(lambda site: Static(site.layer + 1, newest) if opens_block(site) and site.kind != plain else None)

    def open(self, x: Tensor, past: Past = None) -> Layered:
        return Layered((ops.layer_norm(x, self.eps) if self.normed else x,))

    def inner(self, base: Tensor, delta: Tensor) -> Tensor:
        return base + delta if self.keeps_x else delta

    def output(self, base: Tensor, delta: Tensor) -> Tensor:
        return ops.layer_norm(delta, self.eps) if self.normalized else delta
