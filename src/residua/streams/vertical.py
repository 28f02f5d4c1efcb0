"""Vertical Attention, reconstructed: a learned convex combination of normalised layer outputs."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from residua import ops
from residua.plan import Plan
from residua.registry import register
from residua.stream import Conversion, Past
from residua.streams._layered import Layered, StaticLayered
from residua.streams._parts import Static, opens_block

_NORMS = {"rms": ops.rms_norm, "l2": ops.l2_norm, "layernorm": ops.layer_norm}


@register("vertical")
class Vertical(StaticLayered):
    """x_l = sum_{i<=l} softmax(a_l)_i H_i / |H_i|, static weights over normalised layer outputs.

    RECONSTRUCTED from the abstract and the reviews of a submission without public code: the weights do not depend
    on the input, and the outputs are divided by their own norm. What those sources leave open is an option; the
    defaults make it ELC-BERT "normalized" for decoders, with which two reviewers identify it. (The duality paper
    counts it as explicit attention; the reviews describe static weights, and this follows them.)

    norm             rms | l2 | layernorm: how an output is normalised before it is mixed. eps is added to the mean
                     square or variance; for l2 its square is added to the sum of squares.
    inner_residual   a layer's output includes what the layer read (x + its sublayers) or its sublayers alone.
    init             zero: the mean; last: 1 on the newest source before the softmax.
    """

    paper = "Vertical Attention, OpenReview A6uabXKiXc (reconstructed)"
    mixes = "normalised layer outputs"
    conversion = Conversion(
        refusal="it mixes normalised layer outputs, whose scale the base's residual sum needs, so that no setting of "
        "its weights is the base network; train it from scratch"
    )
    cases = ("", "norm=l2,eps=1e-4", "norm=layernorm", "inner_residual=true", "init=last")

    def __init__(
        self,
        plan: Plan,
        *,
        norm: Literal["rms", "l2", "layernorm"] = "rms",
        inner_residual: bool = False,
        init: Literal["zero", "last"] = "zero",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(plan)
        self.scaled, self.inner_residual, self.eps = _NORMS[norm], inner_residual, eps
        newest = 1.0 if init == "last" else 0.0
        self.each(lambda site: Static(site.layer + 1, newest) if opens_block(site) and site.kind != "head" else None)

    def open(self, x: Tensor, past: Past = None) -> Layered:
        return Layered((self.scaled(x, self.eps),))

    def output(self, base: Tensor, delta: Tensor) -> Tensor:
        return self.scaled(base + delta if self.inner_residual else delta, self.eps)
