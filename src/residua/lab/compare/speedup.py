"""Effective speedup: how much more compute the baseline would need to reach the loss of a row.

    L(C) = L_inf + A C^-alpha        fitted to the baseline's mean losses over the sizes of a ladder, A and L_inf >= 0
    factor = L^-1(loss of the row) / C of the row

Once per token: C of both is the baseline's compute (operations of its forward and backward passes) for the tokens that
the row saw, so that what the design itself computes is free. And once per processor second: C is the time that each
took, so that it is not.

The interval is a parametric bootstrap (Efron & Tibshirani 1993, chapter 6): each draw takes the baseline's mean at
every size and the row's paired difference from it anew, mean + deviation / sqrt(n) * Student's t with n - 1 degrees of
freedom, fits again and solves again; resampling three to five seeds themselves would give intervals that are too
narrow. A loss below the fitted L_inf is reached by no compute: such a bound is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from jaxtyping import Float

from residua.lab.common.files import Values
from residua.lab.common.stats import ALPHA
from residua.lab.runs import rounded

DRAWS = 2000
FEWEST_RUNGS = 3
"""The curve has three parameters."""
FEWEST_SEEDS = 2
EXPONENTS = np.geomspace(0.01, 2.0, 240)
AXES = ("per_token", "per_cpu_second")


@dataclass(frozen=True, slots=True)
class Rung:
    """The baseline at one size."""

    size: str
    compute: float
    """Of one run, in the unit of the axis."""
    losses: Sequence[float]
    """One a seed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """L_inf, A and alpha, one of each for every fit; C is in units of `unit`."""

    limit: Float[np.ndarray, "fits"]
    scale: Float[np.ndarray, "fits"]
    exponent: Float[np.ndarray, "fits"]
    unit: float

    def compute(self, loss: Float[np.ndarray, "fits"]) -> Float[np.ndarray, "fits"]:
        """The compute at which each curve has a loss; infinite for one that it never has."""
        above = loss - self.limit
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = self.unit * (above / self.scale) ** (-1 / self.exponent)
        return np.where((above > 0) & (self.scale > 0), found, np.inf)


def fit(compute: Sequence[float], losses: Float[np.ndarray, "fits rungs"]) -> Curve:
    """Least squares: for every exponent of a fine grid a straight line in C^-alpha, and the best of them."""
    unit = math.exp(fmean(map(math.log, compute)))
    x = (np.asarray(compute) / unit) ** -EXPONENTS[:, None]  # grid, rungs
    centred = x - x.mean(1, keepdims=True)
    mean = losses.mean(1, keepdims=True)
    scale = np.maximum((losses - mean) @ centred.T / (centred**2).sum(1), 0)  # fits, grid
    limit = mean - scale * x.mean(1)
    through_zero = np.maximum(losses @ x.T / (x**2).sum(1), 0)
    scale, limit = np.where(limit < 0, through_zero, scale), np.maximum(limit, 0)
    squares = ((losses[:, None] - limit[..., None] - scale[..., None] * x) ** 2).sum(2)
    best = squares.argmin(1)
    at = np.arange(len(losses)), best
    return Curve(limit[at], scale[at], EXPONENTS[best], unit)


class Fitted:
    """The curve through the baseline's rungs, and those through every draw of them."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        """At least three rungs, with two seeds or more each."""
        self.rungs = rungs
        self.losses = np.stack([_means(rung.losses, place) for place, rung in enumerate(rungs)], axis=1)
        self.curves = fit([rung.compute for rung in rungs], self.losses)

    def to_json(self) -> Values:
        """The fitted parameters, with intervals."""
        curves = self.curves
        found: Values = {
            name: {
                "value": rounded(float(values[0])),
                "low": _quantile(values[1:], ALPHA / 2),
                "high": _quantile(values[1:], 1 - ALPHA / 2),
            }
            for name, values in (("limit", curves.limit), ("exponent", curves.exponent))
        }
        return found | {"scale": rounded(float(curves.scale[0] * curves.unit ** curves.exponent[0]))}

    def speedup(self, place: int, gaps: Sequence[float], compute: float) -> Values | None:
        """The factor of a row at the size of rung `place`, with its interval.

        gaps:    its losses less the rung's, seed by seed; two or more.
        compute: what one of its runs took, in the unit of the axis.
        None where the baseline does not improve with compute.
        """
        if not self.curves.scale[0] > 0:
            return None
        losses = self.losses[:, place] + _means(gaps, 1 + len(self.rungs))
        factors = self.curves.compute(losses) / compute
        low, high = (_quantile(factors[1:], share) for share in (ALPHA / 2, 1 - ALPHA / 2))
        value = float(factors[0])
        return {
            "factor": rounded(value) if value < math.inf else None,
            "low": low,
            "high": high,
            "significant": low is None or low > 1 or (high is not None and high < 1),
            "extrapolated": value > max(rung.compute for rung in self.rungs) / compute,
        }


def _means(values: Sequence[float], stream: int) -> Float[np.ndarray, "fits"]:
    """The mean, and means as other seeds might have given; every stream of draws is its own, and always the same."""
    count = len(values)
    error = stdev(values) / math.sqrt(count)
    draws = np.random.default_rng([stream, count]).standard_t(count - 1, DRAWS)
    return fmean(values) + error * np.concatenate([[0.0], draws])


def _quantile(values: Float[np.ndarray, "fits"], share: float) -> float | None:
    found = float(np.quantile(values, share, method="higher" if share > 0.5 else "lower"))
    return rounded(found) if found < math.inf else None
