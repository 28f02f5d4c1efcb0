"""The contract between a residual design and any backbone: `open`, then `read` and `write` at every site.

    state = stream.open(embedding)
    for site, sublayer in ...:
        read  = stream.read(state, site, sublayer.norm)      # the sublayer's inputs, normalised
        state = stream.write(state, site, read, sublayer(*read.lanes))
    (x,) = stream.read(state, plan.head, final_norm).lanes   # the head reads and never writes

The state is all that flows: an immutable pytree of tensors (NamedTuples and tuples; no None, no list, no
number). Checkpointing saves it, a pipeline stage sends it, and a module remembers nothing between calls.
"""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from residua.options import check_options, options_of
from residua.plan import Plan, Site
from residua.spec import Value, render

Norm = Callable[..., tuple[Tensor, ...]]
"""`norm(*lanes) -> lanes`. The backbone owns it, so a checkpoint's keys never move; a design calls it once."""

State = Any
"""The state of a design that is not named: a pytree of tensors."""

Past = Any
"""A pytree of tensors kept between decoding steps; None for a design that never mixes tokens."""

Start = Literal["standard", "eps", "no"]
"""How an untrained design relates to `h + f(norm(h))` with the same sublayers: the same network; the same
network where the norm's eps can be neglected (the read is a multiple of the stream); or another network."""

OPEN = "partial"
"""The name of a source that is still growing: every site that lists it sees another value of it."""

S = TypeVar("S")


class Read(NamedTuple):
    """What one site takes from the stream."""

    lanes: tuple[Tensor, ...]
    """The normalised inputs: (x,) or (q, k, v)."""
    carry: State = ()
    """What the matching write needs back: a pytree of tensors that dies there."""
    values: tuple[Tensor, ...] = ()
    """What `Stream.given` says, which a runner fills in."""


class Answer(NamedTuple):
    """What a sublayer gives back where a design asks for more than its output."""

    y: Tensor
    values: Float[Tensor, "b t kv"]
    """The projected values, before anything was done to them."""


class Values(NamedTuple):
    """What a design has to do with the projected values of the attention at a site."""

    kept: bool = False
    """They are handed back beside the output, and `keep` takes them into the state."""
    made: bool = True
    """False: attention makes none, and mixes what it is given."""


class Routing(NamedTuple):
    """read = base + scale * sum_n weights[n] * values[n], before the norm: a read, taken apart."""

    values: tuple[Tensor, ...]
    """What is mixed, in the order of `Stream.sources`."""
    weights: Float[Tensor, "lane n b t group"]
    """One weight per lane, source and token for each of `group` equal slices of the width."""
    base: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    @classmethod
    def static(cls, values: tuple[Tensor, ...], weights: Float[Tensor, " n"]) -> Routing:
        """One lane, whose weights are the same for every token."""
        return cls(values, weights[None, :, None, None, None].expand(1, -1, *values[0].shape[:2], 1))

    def mixed(self) -> Float[Tensor, "lane b t d"]:
        """The lanes that the weights, values, base and scale say were read."""
        values = torch.stack(self.values)
        weights = self.weights.repeat_interleave(values.shape[-1] // self.weights.shape[-1], -1)
        return self.base + self.scale * (weights * values).sum(1)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a design enters a trained network: the options with which it starts as that network."""

    options: Mapping[str, Value] = field(default_factory=dict)
    """Filled in where the spec does not give them."""
    exact: bool = False
    """A gate is zero: not one bit of the logits may differ."""
    eps: bool = False
    """The norms see the stream times a constant, and forget it but for their eps: the allowed difference of the logits
    is widened by what that eps explains."""
    refusal: str | None = None
    """Why no setting of its weights is the base network."""


class _Configured(ABCMeta):
    """Checks the constructor keywords of a design against their annotations, and keeps them as its options."""

    def __call__(cls, plan: Plan, **options: Value) -> Any:
        check_options(cls, options)
        stream = super().__call__(plan, **options)
        defaults = {key: option.default for key, option in options_of(cls).items()}
        stream.options = {k: v for k, v in (defaults | options).items() if v is not None}
        if plan.loop is not None and plan.loop.stream == "shared":
            _share(stream)
        return stream


def _share(stream: Stream) -> None:
    """Give every pass of a loop the parameters of its last, which has the most to choose from."""
    latest = {(site.block, site.kind, site.turn): site for site in stream.plan.sites}
    for site in stream.plan.sites:
        last = latest[site.block, site.kind, site.turn]
        if site is last or site.name not in stream.at or last.name not in stream.at:
            continue
        theirs = dict(stream.at[last.name].named_modules())
        for path, module in stream.at[site.name].named_modules():
            for key, own in module._parameters.items():
                shared = theirs[path]._parameters.get(key) if path in theirs else None
                if own is None or shared is None:
                    continue
                if own.shape != shared.shape:
                    raise ValueError(
                        f"{stream.name} has a weight for every source, and each pass has more of them: its passes "
                        "cannot share; use loop:stream=own"
                    )
                module._parameters[key] = shared


class Stream(nn.Module, ABC, Generic[S], metaclass=_Configured):
    """How sublayers share state across depth.

    A design is one subclass in one file. Its docstring opens with its equation; its constructor keywords are
    its configuration; its parameters live in `self.at`, under the name of the site that uses them.
    """

    name: ClassVar[str]
    """Set by `register`."""
    paper: ClassVar[str]
    """Where the equation comes from: an arXiv number or a title."""
    mixes: ClassVar[str] = "not said"
    """What its sources are, in a few words."""
    released_in: ClassVar[Mapping[str, str]] = {}
    """Released models whose stream this is, each with its spec."""
    cases: ClassVar[tuple[str, ...]] = ("",)
    """Option strings that together use every value of every option; the laws run over each of them."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Options that users of a related design will try, and why this one has no such option."""

    reads_direction: ClassVar[bool] = False
    """Whether `write` keeps only the direction of y, so that a sublayer must not start at zero."""
    sided: ClassVar[bool] = False
    """Whether it has to do with the values of attention (`values`, `given`, `keep`)."""
    attends: ClassVar[bool] = False
    """Whether its reads are declared (`streams._attending`), so that several can be evaluated at once."""
    conversion: ClassVar[Conversion] = Conversion()
    """How it enters a trained network; by default with the options given, if it then starts as that network."""

    plan: Plan
    options: dict[str, Value]

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.at = nn.ModuleDict()

    def each(self, make: Callable[[Site], nn.Module | None]) -> None:
        """Give every site the parameters that `make` builds for it; None for none."""
        for site in self.plan.readers:
            part = make(site)
            if part is not None:
                self.at[site.name] = part

    def part(self, site: Site) -> Any:
        """The parameters of a site, or None. (Any: a design knows the type of its own parts.)"""
        return self.at._modules.get(site.name)  # asked at every site of every token: a ModuleDict's own ways are slow

    @abstractmethod
    def open(self, x: Float[Tensor, "b t d"], past: Past = None) -> S:
        """The state before the first site, from the embedding (and what earlier tokens left behind)."""

    @abstractmethod
    def read(self, state: S, site: Site, norm: Norm) -> Read:
        """What `site` takes from the stream."""

    @abstractmethod
    def write(self, state: S, site: Site, read: Read, y: Float[Tensor, "b t d"]) -> S:
        """The state after the sublayer at `site` answered its read with `y`."""

    @property
    @abstractmethod
    def starts(self) -> Start:
        """What the design is before training; a law holds it to that."""

    @property
    def mixes_tokens(self) -> bool:
        """Whether a token's state depends on earlier tokens; such a design needs `past`, and cannot skip padding."""
        return False

    def feeds(self, site: Site) -> int:
        """How many lanes `read` returns at `site`: 1, or 3 for a site that takes q, k and v apart."""
        return 1

    def takes_norm(self, site: Site) -> bool:
        """Whether `read` calls the backbone's norm at `site`. Where a design normalises by itself, or not at all, the
        backbone has no norm."""
        return True

    def extra(self, site: Site) -> int:
        """How many channels the output projection at `site` has beyond the width; `write` then gets y [b t d+extra]."""
        return 0

    @property
    def takes_ids(self) -> bool:
        """Whether `open` is also given the token ids: `open(x, past, ids=ids)`."""
        return False

    def values(self, site: Site) -> Values:
        """What the design does with the projected values of attention at `site`; nothing by default."""
        return Values()

    def given(self, state: S, site: Site, lanes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(scale [b t head] or [1], shift [b t head*e]): attention mixes scale v + shift over its tokens where it would
        mix its projected values v. Empty: v. Asked of designs that are `sided`."""
        return ()

    def keep(self, state: S, site: Site, values: Float[Tensor, "b t kv"]) -> S:
        """The state with the values that attention at `site` handed back, just before its write."""
        return state

    def past(self, state: S) -> Past:
        """What the next tokens need from this pass. None: the design never mixes tokens."""
        return None

    def sources(self, site: Site) -> tuple[str, ...]:
        """Names of what `site` mixes, known from the plan alone; empty where nothing is mixed."""
        return ()

    def routing(self, state: S, site: Site) -> Routing | None:
        """The mixture that `read` applies at `site`, taken apart; None where `sources` is empty."""
        return None

    def gates(self, state: S, site: Site, read: Read) -> Mapping[str, Tensor]:
        """What scales the design's own terms at `site`, by name: drawn by a report. A gate called `beta`, in 0 to 2,
        also gets a histogram."""
        return {}

    def weights(self, state: S, site: Site) -> Float[Tensor, "lane n b t group"] | None:
        """The weights of `routing`: what a report draws."""
        routing = self.routing(state, site)
        return None if routing is None else routing.weights

    def forward(self, state: S, site: Site, norm: Norm, f: Callable[..., Tensor]) -> S:
        """One step of the stream: read, apply the sublayer, write."""
        read = self.read(state, site, norm)
        return self.write(state, site, read, f(*read.lanes))

    @classmethod
    def upgraded(cls, options: dict[str, Value]) -> tuple[str, dict[str, Value]]:
        """The name and options today of a spec that an earlier version wrote."""
        return cls.name, options

    @classmethod
    def entering(cls, options: Mapping[str, Value]) -> dict[str, Value]:
        """The options with which a design given these enters a trained network."""
        return {**options, **{key: value for key, value in cls.conversion.options.items() if key not in options}}

    @classmethod
    def over(cls, inner: Stream, value: Value) -> Stream:
        """A design wrapped in this one: what `registry.wraps` is for."""
        raise TypeError(f"{cls.name} wraps no design")

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Put every parameter back to its declared start, whatever a framework's own init made of it."""
        for part in self.modules():
            reset = getattr(part, "reset_parameters", None)
            if part is not self and reset is not None:
                reset(generator)

    @property
    def spec(self) -> str:
        """The shortest spec string that builds this design again."""
        known = options_of(type(self))
        return render(self.name, {k: v for k, v in self.options.items() if v != known[k].default})

    @property
    def config(self) -> dict[str, Value]:
        """The JSON form, every option written out: what a checkpoint stores."""
        return {"name": self.name, **self.options}

    def extra_repr(self) -> str:
        return getattr(self, "spec", "")
