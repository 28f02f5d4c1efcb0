"""What two or more designs share: parameter holders with a declared start, grouping, and names of sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residua.plan import Plan, Site
from residua.spec import Value

Fill = Callable[[Tensor, torch.Generator | None], object]
Place = int | tuple[EllipsisType, int]


def _constant(tensor: Tensor, generator: torch.Generator | None, *, value: float) -> None:
    tensor.fill_(value)


def _normal(tensor: Tensor, generator: torch.Generator | None, *, std: float) -> None:
    tensor.normal_(0.0, std, generator=generator)


def _uniform(tensor: Tensor, generator: torch.Generator | None, *, low: float, high: float) -> None:
    tensor.uniform_(low, high, generator=generator)


def _marked(tensor: Tensor, generator: torch.Generator | None, *, value: float, at: Place, rest: float) -> None:
    tensor.fill_(rest)[at] = value


def _diagonal(tensor: Tensor, generator: torch.Generator | None, *, value: float, rest: float) -> None:
    tensor.fill_(rest).fill_diagonal_(value)


def constant(value: float) -> Fill:
    """Every entry at `value`."""
    return partial(_constant, value=value)


def normal(std: float) -> Fill:
    """Drawn from N(0, std^2)."""
    return partial(_normal, std=std)


def uniform(low: float, high: float) -> Fill:
    """Drawn from U(low, high)."""
    return partial(_uniform, low=low, high=high)


def marked(value: float, at: Place, rest: float = 0.0) -> Fill:
    """`value` at one place, `rest` elsewhere."""
    return partial(_marked, value=value, at=at, rest=rest)


def diagonal(value: float, rest: float = 0.0) -> Fill:
    """`value` on the diagonal, `rest` off it."""
    return partial(_diagonal, value=value, rest=rest)


def recent(value: float) -> Fill:
    """Zeros, and `value` on the newest source: the last entry of the last axis."""
    return marked(value, (..., -1))


class Part(nn.Module):
    """Parameters of one site, each with its start.

    They are plain parameters of their true shape, not `nn.Linear`s, so that a framework's blanket
    initialisation passes them by; `reset_parameters` puts them back where one does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._starts: dict[str, Fill] = {}

    def add(self, name: str, shape: tuple[int, ...], start: Fill) -> None:
        """A parameter and where it starts."""
        self._starts[name] = start
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        with torch.no_grad():
            start(getattr(self, name), None)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Every parameter of this part at its start."""
        for name, start in self._starts.items():
            start(getattr(self, name), generator)


class Query(Part):
    """The pseudo-query w and key gain g of one depth read; only w * g matters. w starts at 0, or N(0, std^2)."""

    query: Tensor
    gain: Tensor

    def __init__(self, width: int, std: float = 0.0) -> None:
        super().__init__()
        self.add("query", (width,), normal(std) if std else constant(0.0))
        self.add("gain", (width,), constant(1.0))

    def folded(self) -> Tensor:
        """The query with the key gain in it: what `ops.attend` takes."""
        return self.query * self.gain

    @staticmethod
    def stacked(several: Sequence[Query]) -> Tensor:
        """The folded queries of several reads, [k d]."""
        return torch.stack([each.query for each in several]) * torch.stack([each.gain for each in several])


class Static(Part):
    """One learned scalar per source, the same for every token."""

    alpha: Tensor

    def __init__(self, sources: int, newest: float) -> None:
        super().__init__()
        self.add("alpha", (sources,), recent(newest))


def projected(x: Tensor, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x W of every map W, [d k] or [d] for a single column, by one product.

    A product with a few columns runs at a tenth of the rate of others, and the gradient of such a map at a thirtieth;
    as rows of one matrix they take neither.
    """
    rows = [one[None] if one.ndim == 1 else one.transpose(0, 1) for one in maps]
    return F.linear(x, torch.cat(rows)).split([len(one) for one in rows], -1)


def group_size(design: str, plan: Plan, block: int | None, blocks: int | None) -> int:
    """Sublayers a source: `block=k` says it, `blocks=n` makes it ceil(M / n); neither means 1.

    M need not divide: the last group may be short, and ceil may leave fewer than n groups.
    """
    total = len(plan.sites)
    if block is not None and blocks is not None:
        raise ValueError(f"{design}: give block={block} (sublayers a source) or blocks={blocks} (in all), not both")
    for key, value in (("block", block), ("blocks", blocks)):
        if value is not None and not 1 <= value <= total:
            raise ValueError(f"{design}: {key} must be 1..{total}, the sublayers of this plan, not {value}")
    if blocks is not None:
        return -(-total // blocks)
    return 1 if block is None else block


def group_names(plan: Plan, size: int, count: int) -> tuple[str, ...]:
    """Names of the first `count` finished groups: the sublayer's own name where a group is one sublayer."""
    return tuple(plan.sites[i].name if size == 1 else f"block{i}" for i in range(count))


def block_names(plan: Plan, count: int) -> tuple[str, ...]:
    """Names of the embedding and the outputs of the first `count` Transformer blocks."""
    return ("embed", *(site.prefix for site in plan.sites if site.first and site.layer < count))


def opens_block(site: Site) -> bool:
    """Whether the site reads after one or more whole blocks: the first sublayer of a later block, or the head."""
    return site.first and site.layer > 0


def positive(design: str, **options: int) -> None:
    """Refuse a count below 1."""
    for key, value in options.items():
        if value < 1:
            raise ValueError(f"{design}: {key} must be at least 1, not {value}")


def divides(design: str, plan: Plan, heads: int) -> None:
    """Refuse heads that do not split the width."""
    if plan.width % heads:
        raise ValueError(f"{design}: heads={heads} does not divide the width {plan.width}")


def belongs(design: str, form: str, option: str, value: Value | None, *forms: str) -> None:
    """Refuse an option that the chosen form does not have."""
    if value is not None and form not in forms:
        raise ValueError(f"{design}: {option} belongs to form={'|'.join(forms)}; form={form} has none")
