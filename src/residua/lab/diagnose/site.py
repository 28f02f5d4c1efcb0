"""What one site was seen to do: sums on the model's device, which `summary` turns into numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from residua.lab.common.files import Values
from residua.lab.diagnose import metrics
from residua.plan import Site
from residua.stream import Routing


class Mean:
    """A mean over several forwards: the sum stays where it was computed."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, total: Tensor, count: int) -> None:
        """Take in a sum over `count` items."""
        # Out of place: a sum made under inference_mode may not be changed outside of it.
        self.total = total if self.total is None else self.total + total
        self.count += count

    def read(self) -> Any:
        """The mean as numbers and lists; None if nothing was added."""
        return None if self.total is None else plain(self.total / self.count)


class Spread:
    """Mean, standard deviation and range of a gate."""

    def __init__(self) -> None:
        self.first, self.second = Mean(), Mean()
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Take in the values of one forward."""
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        self.first.add(values.sum(), values.numel())
        self.second.add(values.square().sum(), values.numel())
        low, high = values.aminmax()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def read(self) -> dict[str, float | None]:
        """The four numbers."""
        assert self.low is not None
        assert self.high is not None
        mean, square = self.first.read(), self.second.read()
        finite = mean is not None and square is not None
        return {
            "mean": mean,
            "std": math.sqrt(max(square - mean * mean, 0.0)) if finite else None,
            "min": plain(self.low),
            "max": plain(self.high),
        }


class SiteRecord:
    """One site over all forwards recorded; `weights` are those of the last."""

    def __init__(self, site: Site, sources: tuple[str, ...]) -> None:
        self.site, self.sources = site, sources
        self.weights: Float[Tensor, "lane n b t group"] | None = None
        """As the design applies them, signed; None before the first forward, and where nothing is mixed."""
        self.gates: dict[str, Spread] = {}
        self._means: dict[str, Mean] = {}
        self._counts: dict[str, Tensor] = {}
        self._lowest: Tensor | None = None
        self._total_gap: Tensor | None = None

    def see_routing(self, routing: Routing, *, keep: bool, similarity: bool) -> None:
        """Take in the mixture of one forward."""
        weights = routing.weights.detach()
        share = metrics.shares(weights)
        wide = weights.to(share.dtype)
        reads, tokens = share[:, 0].numel(), share[0, 0].numel()
        information = metrics.entropy(share)
        self._add("max_weight", metrics.max_weight(share).sum(), reads)
        self._add("entropy", information.sum(), reads)
        self._add("effective_sources", information.exp().sum(), reads)
        self._add("total_weight", wide.sum(), reads)
        self._add("mean_weights", wide.sum((2, 3, 4)), tokens)
        self._add("mean_shares", share.sum((2, 3, 4)), tokens)
        self._count("favourites", metrics.favourites(share))
        lowest, gap = wide.min(), (wide.sum(1) - 1).abs().max()
        self._lowest = lowest if self._lowest is None else torch.minimum(self._lowest, lowest)
        self._total_gap = gap if self._total_gap is None else torch.maximum(self._total_gap, gap)
        if keep:
            self.weights = weights
        if similarity:
            rows = routing.values[0].shape[0] * routing.values[0].shape[1]
            self._add("cosine", metrics.cosine_matrix(routing.values) * rows, rows)

    def see_gate(self, name: str, values: Tensor) -> None:
        """Take in a gate of one forward."""
        self.gates.setdefault(name, Spread()).add(values)
        if name == "beta":
            self._add("regimes", metrics.beta_regimes(values) * values.numel(), values.numel())
            self._count("histogram", metrics.beta_histogram(values))

    def see_square(self, name: str, x: Tensor) -> None:
        """Take in a tensor whose RMS over all forwards is wanted."""
        self._add(name, metrics.mean_square(x) * x.numel(), x.numel())

    def see_gradient(self, gradient: Tensor) -> None:
        """Take in the gradient of one backward."""
        self._add("gradient", metrics.mean_square(gradient.detach()) * gradient.numel(), 1)

    def summary(self) -> Values:
        """The numbers of this site, ready for JSON; None for what does not apply or is not finite."""
        found: Values = {
            "site": self.site.name,
            "index": self.site.index,
            "layer": self.site.layer,
            "kind": self.site.kind,
            "sources": list(self.sources),
            "stream_rms": self._root("stream"),
            "output_rms": self._root("output"),
            "gradient_norm": self._root("gradient"),
            "gates": {name: gate.read() for name, gate in self.gates.items()},
        }
        if "max_weight" in self._means:
            found["routing"] = self._routing()
        if "histogram" in self._counts:
            found["beta"] = {
                "edges": list(metrics.BETA_EDGES),
                "counts": [int(count) for count in self._counts["histogram"].tolist()],
                "regimes": dict(zip(metrics.BETA_REGIMES, self._means["regimes"].read(), strict=True)),
            }
        return found

    def _routing(self) -> Values:
        assert self._lowest is not None
        assert self._total_gap is not None
        n, means = len(self.sources), {name: mean.read() for name, mean in self._means.items()}
        information, largest = means["entropy"], means["max_weight"]
        share = information / math.log(n) if n > 1 and information is not None else None
        counts = self._counts["favourites"]
        agreeing = plain(metrics.agreement(counts))
        found = {
            "weights": metrics.weights_kind(self._lowest.item(), self._total_gap.item()),
            "finite": information is not None,
            "max_weight": largest,
            "normalised_entropy": share,
            "effective_sources": means["effective_sources"],
            "contrast": None if largest is None else largest - 1 / n,
            "agreement": agreeing,
            "favourite": self.sources[int(counts.sum((0, 2)).argmax())],
            "collapsed": None if share is None else metrics.collapsed(n, share, agreeing),
            "total_weight": means["total_weight"],
            "mean_weights": means["mean_weights"],
            "mean_shares": means["mean_shares"],
        }
        cosine = self._means.get("cosine")
        if cosine is not None and cosine.total is not None:
            found["cosine"] = means["cosine"]
            found["effective_rank"] = finite(metrics.effective_rank(cosine.total / cosine.count))
        return found

    def _add(self, name: str, total: Tensor, count: int) -> None:
        self._means.setdefault(name, Mean()).add(total, count)

    def _count(self, name: str, counts: Tensor) -> None:
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def _root(self, name: str) -> float | None:
        square = self._means[name].read() if name in self._means else None
        return None if square is None else math.sqrt(square)


def plain(tensor: Tensor) -> Any:
    """A number or nested lists, with None for what is not finite: JSON has no NaN."""
    return finite(tensor.tolist())


def finite(value: Any) -> Any:
    """The same, with None for every number that is not finite."""
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value if math.isfinite(value) else None
