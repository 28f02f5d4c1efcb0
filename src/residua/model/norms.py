"""Norms of sublayers, and where they stand: before the sublayer, on both sides, or behind it.

    pre        f(N(x))           both       N'(f(N(x)))  (Gemma 2, Peri-LN)      reordered  N'(f(x))  (OLMo 2)
    scaled     N(x) / sqrt(l + 1) in block l, in the place of N(x)               (LayerNorm scaling, arXiv 2502.05795)

These act on what is read and on what is written, and so stand beside any residual design. A norm of the stream itself,
N(x + f(x)), is a design.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from residua import ops
from residua.options import check_options, options_of
from residua.plan import Site, Slot


class LaneNorm(nn.Module):
    """scale x / rms(x) * gain for every lane: one gain for all, or one each."""

    def __init__(self, width: int, gains: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(gains, width))
        self.eps = eps
        self.scale = 1.0

    def forward(self, *lanes: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b t d"], ...]:
        weight = self.weight
        if len(lanes) == 1:  # asked at every site of every token, and a view is cheaper than rows
            normed: tuple[Tensor, ...] = (ops.rms_norm(lanes[0], self.eps, weight.view(-1)),)
        else:
            gains = weight if len(weight) == len(lanes) else weight.expand(len(lanes), -1)
            normed = tuple(ops.rms_norm(x, self.eps, gain) for x, gain in zip(lanes, gains, strict=True))
        return normed if self.scale == 1.0 else tuple(self.scale * x for x in normed)


class NoNorm(nn.Module):
    """Where the design normalises what is read, or nothing does."""

    def forward(self, *lanes: Tensor) -> tuple[Tensor, ...]:
        return lanes


class Placement:
    """Where the norms of a sublayer stand: options of every kind in a layout, such as `mlp:norm=both`."""

    def __init__(self, *, norm: Literal["pre", "both", "reordered"] = "pre", scaled: bool = False) -> None:
        self.before, self.behind, self.scaled = norm != "reordered", norm != "pre", scaled
        if scaled and not self.before:
            raise ValueError("scaled=true divides what a norm before the sublayer gives, and norm=reordered has none")

    @staticmethod
    def split(slot: Slot) -> tuple[Slot, Placement]:
        """A layout item without its placement, and that placement."""
        known = options_of(Placement)
        placed = {key: value for key, value in slot.options.items() if key in known}
        if placed.get("norm") == "post":
            raise ValueError(
                f"layout item {slot}: norm=post normalises the stream and not the sublayer; use the design "
                "postnorm, or norm=reordered to normalise what the sublayer writes"
            )
        try:
            check_options(Placement, placed)
            build: Callable[..., Placement] = Placement  # whose keywords are checked
            placement = build(**placed)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layout item {slot}: {error}") from None
        return Slot(slot.kind, {key: value for key, value in slot.options.items() if key not in known}), placement

    def norm(self, norm: LaneNorm, site: Site) -> LaneNorm | NoNorm:
        """The norm before the sublayer of a site, from the one that it has by default."""
        norm.scale = (site.layer + 1) ** -0.5 if self.scaled else 1.0
        return norm if self.before else NoNorm()
