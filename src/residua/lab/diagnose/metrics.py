"""The numbers of a routing report, as pure functions of tensors: no model, no state, no transfer to the host.

    shares             p_n = |w_n| / sum |w|; for weights that are a distribution, the weights themselves
    entropy            H = -sum p ln p, and H / ln n, which is 1 for a uniform read
    effective sources  exp(H)
    contrast           max p - 1/n
    collapse           H / ln n > 0.95, or one source is the largest for more than 95 % of tokens; sites with n >= 3

A weight has the axes [lane n b t group]; what is computed per read has [lane b t group].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Kind = Literal["distribution", "scaled", "signed"]
"""What the weights of a site are: not negative with sum 1; not negative with another sum; some negative."""

COLLAPSED_ENTROPY = 0.95
COLLAPSED_AGREEMENT = 0.95
JUDGED_SOURCES = 3
"""Sites with fewer sources have too little to choose from to be called collapsed."""

SILENT = 1e-6
"""A read whose |weights| sum to less takes nothing: its shares would be those of rounding errors."""

BETA_EDGES = tuple(edge / 10 for edge in range(21))
"""Of the histogram of a gate in 0 to 2: twenty equal bins."""
BETA_REGIMES = ("identity", "projection", "reflection", "between")


def shares(weights: Float[Tensor, "lane n b t group"]) -> Float[Tensor, "lane n b t group"]:
    """|w_n| / sum |w|, in at least float32; 1/n each where the read takes nothing."""
    sizes = weights.to(torch.promote_types(weights.dtype, torch.float32)).abs()
    total = sizes.sum(1, keepdim=True)
    return torch.where(total < SILENT, 1 / weights.shape[1], sizes / total.clamp_min(SILENT))


def weights_kind(lowest: float, total_gap: float) -> Kind:
    """What weights are, from the smallest of them and the largest |sum - 1| of a read."""
    if lowest < -SILENT:
        return "signed"
    return "distribution" if total_gap < 1e-3 else "scaled"


def max_weight(share: Float[Tensor, "lane n b t group"]) -> Float[Tensor, "lane b t group"]:
    """The largest share of each read."""
    return share.amax(1)


def entropy(share: Float[Tensor, "lane n b t group"]) -> Float[Tensor, "lane b t group"]:
    """-sum p ln p in nats, with 0 ln 0 = 0."""
    return -torch.xlogy(share, share).sum(1)


def favourites(share: Float[Tensor, "lane n b t group"]) -> Float[Tensor, "lane n group"]:
    """How many tokens have source n as their largest; the first of equals."""
    largest = share.argmax(1, keepdim=True)
    order = torch.arange(share.shape[1], device=share.device).view(1, -1, 1, 1, 1)
    return (largest == order).sum((2, 3)).to(share.dtype)


def agreement(counts: Float[Tensor, "lane n group"]) -> Float[Tensor, ""]:
    """The part of tokens that share their largest source, found for every lane and group apart, and averaged."""
    return (counts.amax(1) / counts.sum(1)).mean()


def collapsed(sources: int, entropy_share: float, agreeing: float) -> bool | None:
    """Whether a site routes no more: uniform, or the same source for all; None below 3 sources.

    A design whose weights are static always agrees with itself, and is collapsed by this definition.
    """
    if sources < JUDGED_SOURCES:
        return None
    return entropy_share > COLLAPSED_ENTROPY or agreeing > COLLAPSED_AGREEMENT


def cosine_matrix(values: Sequence[Float[Tensor, "b t d"]]) -> Float[Tensor, "n n"]:
    """The cosine of every pair of sources, averaged over tokens; 0 beside a source that is 0."""
    wide = torch.promote_types(values[0].dtype, torch.float32)
    tokens = values[0].shape[0] * values[0].shape[1]
    unit = torch.stack([torch.nn.functional.normalize(value.to(wide), dim=-1, eps=1e-30).flatten() for value in values])
    return unit @ unit.T / tokens


def effective_rank(matrix: Float[Tensor, "n n"]) -> float:
    """exp(-sum p ln p) of the eigenvalues p of a cosine matrix over their sum: 1 if all sources are parallel, n if
    they are orthogonal, 0 if all of them are 0."""
    if not matrix.isfinite().all():
        return math.nan
    values = torch.linalg.eigvalsh(matrix.double().cpu()).clamp_min(0)
    total = values.sum()
    if total <= 0:
        return 0.0
    p = values / total
    return math.exp(-torch.xlogy(p, p).sum().item())


def mean_square(x: Tensor) -> Float[Tensor, ""]:
    """The mean square of all entries, in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def beta_regimes(beta: Tensor) -> Float[Tensor, " 4"]:
    """The part of the gates that keep (below 0.2), project (0.8 to 1.2), reflect (above 1.8), or none of these."""
    beta = beta.to(torch.promote_types(beta.dtype, torch.float32))
    keeps, projects, reflects = beta < 0.2, (beta >= 0.8) & (beta <= 1.2), beta > 1.8
    regimes: list[Bool[Tensor, ...]] = [keeps, projects, reflects, ~(keeps | projects | reflects)]
    return torch.stack([regime.to(beta.dtype).mean() for regime in regimes])


def beta_histogram(beta: Tensor) -> Float[Tensor, " 20"]:
    """How many gates fall in each of the bins of `BETA_EDGES`; 2 itself belongs to the last."""
    beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).flatten()
    inner = torch.tensor(BETA_EDGES[1:-1], device=beta.device, dtype=beta.dtype)
    reached = (beta[:, None] >= inner).sum(0)
    every = torch.full((1,), beta.numel(), device=beta.device)
    above = torch.cat([every, reached, torch.zeros_like(every)])
    return (above[:-1] - above[1:]).to(beta.dtype)
