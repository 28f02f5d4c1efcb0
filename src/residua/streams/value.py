"""Value residuals: attention mixes values of the first layer, or of a table, beside its own, on any design."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from residua.plan import Plan, Site
from residua.registry import wraps
from residua.spec import parse, render
from residua.stream import Norm, Past, Read, Routing, Start, State, Stream, Values
from residua.streams._attending import Mixture, Route
from residua.streams._parts import Fill, Part, constant, normal, uniform

Form = Literal["resformer", "learned", "svformer", "mixed", "satformer", "table", "zero_table"]


class Sided(NamedTuple):
    """The state of the design, and what values are made from beside the layer's own."""

    state: State
    first: tuple[Tensor, ...] = ()
    """V_1, the projected values of the first attention: none or one."""
    ids: tuple[Tensor, ...] = ()
    """The tokens, where tables look them up: none or one."""


class Weighed(Part):
    """logits of a gate over heads, from what the attention reads."""

    weight: Tensor

    def __init__(self, heads: int, inputs: int, start: Fill) -> None:
        super().__init__()
        self.add("weight", (heads, inputs), start)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., : self.weight.shape[1]].to(self.weight.dtype), self.weight)


class Biased(Weighed):
    """The same with a bias."""

    bias: Tensor

    def __init__(self, heads: int, inputs: int, start: Fill) -> None:
        super().__init__(heads, inputs, start)
        self.add("bias", (heads,), constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Table(Part):
    """A vector of values for every token."""

    vectors: Tensor

    def __init__(self, tokens: int, width: int, start: Fill) -> None:
        super().__init__()
        self.add("vectors", (tokens, width), start)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.vectors)


class Shared(Part):
    """One logit for every attention after the first, and lambda_1 = count softmax(logits)."""

    logits: Tensor
    own: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add("logits", (count,), constant(0.0))
        self.add("own", (count,), constant(0.5))


@wraps("value")
class Valued(Stream[Sided]):
    """v' = a v + b V_1, or v' = v + g T[token]: what attention mixes over tokens, on the stream of any design.

    v are the projected values of the layer, V_1 those of the first attention, both before tokens are mixed; v' is what
    a cache keeps. The first attention has its own v, but for tables.

    resformer   v' = (v + V_1) / 2 (arXiv 2410.17897).
    learned     v' = l2 v + l1 V_1, l1 = L softmax(logits) over the layers after the first and l2 from 1/2, as in the
                repository of SATFormer.
    svformer    v' = V_1: later layers have no values of their own.
    mixed       v' = V_1 + m (v - V_1), m = sigmoid(linear(x)) a token and head, as in x-transformers: m weighs the
                layer's own.
    satformer   v' = v + relu(W x) V_1, one a token and head (arXiv 2605.03953); W ~ N(0, 0.02^2).
    table       v' = v + 3 sigmoid(W x[:12]) T[token], one a token and head, in every second layer and the last, as in
                nanochat; T ~ U(+-sqrt(3 / d)), W ~ U(0, 0.02).
    zero_table  v' = v + T[token] in the first and the last layer, T = 0 at the start, as in NeoMME.
    """

    paper = "arXiv 2410.17897"
    sided = True
    cases = (
        "standard:value=resformer",
        "delta:value=learned",
        "mhc:value=svformer",
        "mudd:value=mixed",
        "attnres:blocks=2,value=satformer",
        "standard:value=table",
        "delta:blocks=2,value=zero_table",
        "ddl:value=resformer",
    )

    def __init__(self, plan: Plan, *, value: Form = "resformer") -> None:
        super().__init__(plan)
        self.form = value
        self.sites = tuple(site for site in plan.sites if site.kind == "attn")
        if not self.sites or (len(self.sites) < 2 and "table" not in value):
            raise ValueError(f"value={value} shares values among attentions, and this plan has {len(self.sites)}")
        self.places = {
            site.name: place for place, site in enumerate(self.sites)
        }  # by name, which a compiler can look up
        self.side = nn.ModuleDict()
        for site in self.sites:
            part = self._part(site)
            if part is not None:
                self.side[site.name] = part
        if value == "learned":
            self.side["lambdas"] = Shared(len(self.sites) - 1)

    def _part(self, site: Site) -> nn.Module | None:
        (heads, width), plan, place = self.plan.kv, self.plan, self.places[site.name]
        if self.form == "mixed" and place:
            return Biased(heads, plan.width, constant(0.0))
        if self.form == "satformer" and place:
            return Weighed(heads, plan.width, normal(0.02))
        last = len(self.sites) - 1
        if self.form == "table" and place % 2 == last % 2:
            bound = math.sqrt(3 / plan.width)
            table = Table(plan.vocab, heads * width, uniform(-bound, bound))
            return nn.ModuleDict({"gate": Weighed(heads, min(12, plan.width), uniform(0.0, 0.02)), "table": table})
        if self.form == "zero_table" and place in (0, last):
            return nn.ModuleDict({"table": Table(plan.vocab, heads * width, constant(0.0))})
        return None

    @classmethod
    def over(cls, inner: Stream, value: Any) -> Stream:
        """A design, with these values on its sites."""
        if isinstance(inner, Valued):
            raise ValueError(f"{inner.spec} shares values already")
        wrapped: Valued = cls(inner.plan, value=value)
        wrapped._over(inner)
        return wrapped

    def _over(self, inner: Stream) -> None:
        # The modules of the design are ours under their own names, so that no key of a checkpoint moves; the design
        # itself is no submodule, or each would be there twice.
        self._design = (inner,)
        side: Any = self._modules.pop("side")
        self._modules.update(inner._modules)
        self.side = side
        self.options = {**inner.options, **self.options}
        self.name = inner.name  # type: ignore[misc]  # an instance is called what its design is called
        self.attends, self.reads_direction = inner.attends, inner.reads_direction  # type: ignore[misc]
        self.paper, self.mixes, self.conversion = inner.paper, inner.mixes, inner.conversion  # type: ignore[misc]

    @property
    def inner(self) -> Any:
        """The design. (Any: what only designs of its kind have is asked of it too.)"""
        return self._design[0]

    @property
    def starts(self) -> Start:
        return self.inner.starts if self.form == "zero_table" else "no"

    @property
    def spec(self) -> str:
        name, options = parse(self.inner.spec)
        return render(name, {**options, "value": self.form})

    @property
    def takes_ids(self) -> bool:
        return "table" in self.form or self.inner.takes_ids

    @property
    def mixes_tokens(self) -> bool:
        return self.inner.mixes_tokens

    def open(self, x: Tensor, past: Past = None, ids: Tensor | None = None) -> Sided:
        asked = {"ids": ids} if self.inner.takes_ids else {}
        tokens = (ids,) if ids is not None and "table" in self.form else ()
        return Sided(self.inner.open(x, past, **asked), ids=tokens)

    def read(self, s: Sided, site: Site, norm: Norm) -> Read:
        return self.inner.read(s.state, site, norm)

    def write(self, s: Sided, site: Site, read: Read, y: Tensor) -> Sided:
        return s._replace(state=self.inner.write(s.state, site, read, y))

    def values(self, site: Site) -> Values:
        place = self.places.get(site.name)
        return Values(kept=place == 0 and "table" not in self.form, made=not (place and self.form == "svformer"))

    def keep(self, s: Sided, site: Site, values: Tensor) -> Sided:
        return s if s.first else s._replace(first=(values,))  # a block that runs again hands back more of them

    def given(self, s: Sided, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        place = self.places.get(site.name)
        if place is None:
            return ()
        x, part = lanes[-1], self.side._modules.get(site.name)
        one = x.new_ones(1)
        if "table" in self.form:
            if part is None:
                return ()
            looked = part["table"](s.ids[0])  # type: ignore[index]  # a ModuleDict
            gate = None if self.form == "zero_table" else 3 * part["gate"](x).sigmoid()  # type: ignore[index]
            return one, looked if gate is None else _by_head(gate, looked)
        if not place:
            return ()
        (first,) = s.first
        match self.form:
            case "resformer":
                return one / 2, first / 2
            case "learned":
                shared: Any = self.side["lambdas"]
                weight = len(self.sites) * shared.logits.softmax(0)[place - 1 : place]
                return shared.own[place - 1 : place], weight.to(first.dtype) * first
            case "svformer":
                return 0 * one, first
            case "mixed":
                m = part(x).sigmoid()  # type: ignore[misc]
                return m, _by_head(1 - m, first)
            case _:
                return one, _by_head(part(x).relu(), first)  # type: ignore[misc]

    def gates(self, s: Sided, site: Site, read: Read) -> Mapping[str, Tensor]:
        part, found = self.side._modules.get(site.name), dict(self.inner.gates(s.state, site, read))
        if isinstance(part, Weighed):
            logits = part(read.lanes[-1])
            found["value"] = logits.sigmoid() if self.form == "mixed" else logits.relu()
        elif part is not None and self.form == "table":
            found["value"] = 3 * part["gate"](read.lanes[-1]).sigmoid()  # type: ignore[index]
        return found

    def part(self, site: Site) -> Any:
        return self.inner.part(site)

    def feeds(self, site: Site) -> int:
        return self.inner.feeds(site)

    def extra(self, site: Site) -> int:
        return self.inner.extra(site)

    def takes_norm(self, site: Site) -> bool:
        return self.inner.takes_norm(site)

    def past(self, s: Sided) -> Past:
        return self.inner.past(s.state)

    def sources(self, site: Site) -> tuple[str, ...]:
        return self.inner.sources(site)

    def routing(self, s: Sided, site: Site) -> Routing | None:
        return self.inner.routing(s.state, site)

    # what `residua.read_groups` asks of a design that declares its reads

    def routes(self, site: Site) -> tuple[Route, ...]:
        """Those of the design."""
        return self.inner.routes(site)

    def mixture(self, s: Sided, site: Site) -> Mixture:
        """That of the design."""
        return self.inner.mixture(s.state, site)

    def base(self, s: Sided) -> Tensor | None:
        """That of the design."""
        return self.inner.base(s.state)

    @property
    def eps(self) -> float:
        """That of the design."""
        return self.inner.eps

    @property
    def heads(self) -> int:
        """That of the design."""
        return self.inner.heads

    @property
    def total(self) -> bool:
        """That of the design."""
        return self.inner.total

    @property
    def centered(self) -> bool:
        """That of the design."""
        return self.inner.centered


FORMS = get_args(Form)


def _by_head(weights: Tensor, values: Tensor) -> Tensor:
    """weights [b t head] times values [b t head*e]."""
    heads = weights.shape[-1]
    weights = weights.to(values.dtype)
    return (values.unflatten(-1, (heads, -1)) * weights[..., None]).flatten(-2)
