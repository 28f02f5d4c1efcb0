"""How rates are chosen: on a grid at every size, or at the first size and carried to the others by a rule.

    none        every size is tuned, on the grid of the plan or on its own
    width       lr(size) = lr(first) * (width / first width)^-1
    completep   lr(size) = lr(first) * (width / first width)^-1 * (depth / first depth)^-1/2

`width` is the rule of muP for AdamW's matrices (Yang et al., arXiv 2203.03466). CompleteP (Dey et al., 2505.01618,
table 1) multiplies every branch by depth^-alpha and the rate of its matrices by width^-1 depth^(alpha-1), for alpha
from 1/2 to 1. The designs here have branches without a multiplier, and alpha = 1/2 is what these come to: behind a norm
a branch counts by its share of the stream, and a stream that sums branches grows with the root of the depth. (alpha =
0, as if there were no norm, was tried first: at 32 blocks twice its rate was better.) Both rules are used for all
parameters, the embedding too, where the papers leave its rate alone: what a rule is worth here, the check says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from residua.lab.compare.sizes import Size

EXPONENTS: Mapping[str, tuple[float, float]] = {"none": (0, 0), "width": (-1, 0), "completep": (-1, -0.5)}
"""Of width and depth, by the name of the rule."""
AROUND = (0.5, 1.0, 2.0)
"""A check tries these multiples of the rate that the rule predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """The rates that every variant chooses from, and the seeds it chooses on."""

    lr: tuple[float, ...] = ()
    residual_lr: tuple[float, ...] = ()
    """Rates of the design's own parameters; empty: the same as lr."""
    seeds: tuple[int, ...] = (1000,)
    close: float | None = None
    """Nats: only rates within this of the best on the first seed are tried on the others, and of those that stay so
    close the smallest is chosen. None: all are tried, and the best is chosen."""
    carry: str = "none"
    """The rule that carries the rates of the first size to the others."""
    check: tuple[str, ...] = ()
    """Sizes, such as 8x64, at which three rates around the predicted one are tried; they change no rate."""
    check_designs: tuple[str, ...] = ()
    """Whose rates are checked; empty: those of every row."""

    def verify(self, sizes: tuple[Size, ...], designs: tuple[str, ...]) -> None:
        """Refuse what does not fit together."""
        grids = {"tune.lr": self.lr, "tune.residual_lr": self.residual_lr}
        for key, rates in (grids | {f"sizes: lr of {size}": size.lr for size in sizes}).items():
            for rate in rates:
                if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
                    raise ValueError(f"{key} are positive numbers, not {rate!r}")
            if len(set(rates)) < len(rates):
                raise ValueError(f"{key} names a rate twice")
            if len({f"{rate:g}" for rate in rates}) < len(rates):
                raise ValueError(f"two rates of {key} differ by less than is shown, and would share the folder")
        if any(size.lr for size in sizes) and (self.carry != "none" or not self.lr):
            raise ValueError("a size has an lr of its own in place of tune.lr, where each is tuned: carry is none")
        if self.close is not None:
            if not isinstance(self.close, int | float) or isinstance(self.close, bool) or not 0 < self.close < math.inf:
                raise ValueError(f"tune.close is a positive number of nats, not {self.close!r}")
            if not self.lr or len(self.seeds) < 2:
                raise ValueError("tune.close needs tune.lr, and a second of tune.seeds to try what is close on")
        if self.residual_lr and not self.lr:
            raise ValueError("tune.residual_lr needs tune.lr: rates are tuned together")
        if self.carry not in EXPONENTS:
            raise ValueError(f"tune.carry is {', '.join(EXPONENTS)}, not {self.carry!r}")
        if self.carry != "none" and not self.lr:
            raise ValueError(f"tune.carry={self.carry} carries what tune.lr finds at the first size; give tune.lr")
        if self.check_designs and not self.check:
            raise ValueError("tune.check_designs needs tune.check, the size of the check")
        higher = [str(size) for size in sizes[1:]]
        for size in self.check:
            if self.carry == "none" or size not in higher:
                raise ValueError(
                    f"tune.check={size} checks a rule (tune.carry) at a size after the first "
                    f"({', '.join(higher) or 'there is none'})"
                )
        for spec in self.check_designs:
            if spec not in designs:
                raise ValueError(f"tune.check_designs names {spec!r}, which is not among the designs")

    def factor(self, size: Size, first: Size) -> float:
        """What a rate of the first size is multiplied by at another."""
        width, depth = EXPONENTS[self.carry]
        return (size.width / first.width) ** width * (size.depth / first.depth) ** depth

    def describe(self) -> str:
        """The rule in a sentence; empty without one."""
        rule = {"width": "lr ~ width^-1", "completep": "lr ~ width^-1 depth^-1/2 (CompleteP at alpha = 1/2)"}
        return rule.get(self.carry, "")
