"""The static geometry of a model: which sublayers read and write the stream, and in what order.

Nothing here knows a tensor: a plan can be built, printed, cut and counted without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from residua.options import check_options
from residua.spec import Value, parse_value

_lanes = {"attn": 3, "swa": 3, "mlp": 1, "conv": 1, "canon": 1}
LANES: Mapping[str, int] = MappingProxyType(_lanes)
"""The sublayer kinds and how many inputs each can tell apart: q, k, v for attention, one for the rest.

They are listed here alone. A class says in its own header which of them it is: `class MLP(Sublayer, kind="mlp")` in
`residua.model`, `class InsertedSWA(Inserted, kind="swa")` in `residua.hf`."""


def declare(kind: str, lanes: int) -> None:
    """Make a new sublayer kind known to every layout."""
    if not kind.isidentifier() or lanes < 1:
        raise ValueError(f"a sublayer kind is a word and takes at least one lane, not {kind!r} with {lanes}")
    if _lanes.setdefault(kind, lanes) != lanes:
        raise ValueError(f"sublayer {kind!r} takes {_lanes[kind]} lanes, not {lanes}")


class Kinds(dict[str, type]):
    """The classes of one base, by the sublayer kind that each is."""

    def add(self, kind: str | None, cls: type, lanes: int | None = None) -> None:
        """Take in a class whose header names its kind; one that is given lanes is a new kind."""
        if kind is None:
            return
        if lanes is not None:
            declare(kind, lanes)
        if kind not in LANES:
            raise ValueError(f"{cls.__name__}: unknown sublayer {kind!r}; a new kind also says its lanes")
        if kind in self:
            raise ValueError(f"sublayer {kind!r} is {self[kind].__name__} already, and cannot be {cls.__name__} too")
        self[kind] = cls

    def of(self, slot: Slot) -> type:
        """The class for an item of a layout, whose options are checked."""
        if slot.kind not in self:
            raise ValueError(f"layout item {slot}: there is no {slot.kind} here; choose from {', '.join(self)}")
        try:
            check_options(self[slot.kind], slot.options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layout item {slot}: {error}") from None
        return self[slot.kind]


@dataclass(frozen=True, slots=True)
class Slot:
    """One item of a layout: a sublayer kind and its own options, written `swa:window=16:mode=local`."""

    kind: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True, slots=True)
class Site:
    """A place where something reads the stream: a sublayer, or the head."""

    index: int
    """0, 1, 2, ... in reading order; the head is last."""
    layer: int
    """The Transformer block it belongs to; for the head, the number of blocks."""
    kind: str
    """A key of `LANES`, or "head"."""
    first: bool
    """Opens its block."""
    last: bool
    """Closes its block."""
    lanes: int = 1
    """Inputs the sublayer can tell apart: 3 for attention (q, k, v)."""
    turn: int = 0
    """How many sublayers of the same kind come before it in its block."""
    name: str = field(init=False, compare=False)
    """`l3_attn`, `l3_attn2` for the second of a kind, or `head`: one string for the parameter prefix, the report label
    and the pipeline key. Made once, because a token asks for it at every site."""

    def __post_init__(self) -> None:
        inner = f"l{self.layer}_{self.kind}" + (str(self.turn + 1) if self.turn else "")
        object.__setattr__(self, "name", "head" if self.kind == "head" else inner)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every site of a model, in reading order, and the width they share."""

    width: int
    sites: tuple[Site, ...]
    head: Site
    vocab: int
    """How many token ids there are."""
    kv: tuple[int, int]
    """How many heads the values of attention have, and their width."""

    @classmethod
    def regular(
        cls,
        width: int,
        depth: int,
        layout: str | Sequence[str | Slot] = ("attn", "mlp"),
        *,
        vocab: int = 1,
        kv: tuple[int, int] | None = None,
    ) -> Plan:
        """`depth` equal blocks of the sublayers in `layout`, then the head.

        vocab, kv: what few designs ask for, the number of token ids, and heads and head width of attention's values
                   (one head of the whole width by default).
        """
        if width < 1:
            raise ValueError(f"a plan needs a width of at least 1, not {width}")
        if depth < 1:
            raise ValueError(f"a plan needs at least one block, not depth={depth}")
        kinds = [slot.kind for slot in parse_layout(layout)]
        sites = tuple(
            Site(
                index=layer * len(kinds) + place,
                layer=layer,
                kind=kind,
                first=place == 0,
                last=place == len(kinds) - 1,
                lanes=LANES[kind],
                turn=kinds[:place].count(kind),
            )
            for layer in range(depth)
            for place, kind in enumerate(kinds)
        )
        return cls(width, sites, Site(len(sites), depth, "head", first=True, last=True), vocab, kv or (1, width))

    @property
    def depth(self) -> int:
        """The number of Transformer blocks."""
        return self.head.layer

    @property
    def readers(self) -> tuple[Site, ...]:
        """Every site that reads: the sublayers, then the head."""
        return (*self.sites, self.head)

    def block(self, layer: int) -> tuple[Site, ...]:
        """The sites of one Transformer block."""
        return tuple(site for site in self.sites if site.layer == layer)

    def site(self, name: str) -> Site:
        """The site called `name`."""
        for site in self.readers:
            if site.name == name:
                return site
        raise KeyError(f"no site {name!r}; this plan has {', '.join(site.name for site in self.readers)}")


def parse_layout(layout: str | Sequence[str | Slot]) -> tuple[Slot, ...]:
    """`"swa:window=16,attn,mlp"` as slots; an unknown kind is an error that names the known ones."""
    items = layout.split(",") if isinstance(layout, str) else list(layout)
    slots = tuple(item if isinstance(item, Slot) else _parse_slot(item) for item in items)
    if not slots:
        raise ValueError("a layout needs at least one sublayer, such as attn,mlp")
    for slot in slots:
        if slot.kind not in LANES:
            raise ValueError(f"unknown sublayer {slot.kind!r} in layout; choose from {', '.join(LANES)}")
    return slots


def _parse_slot(text: str) -> Slot:
    kind, *pairs = text.strip().split(":")
    options: dict[str, Value] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"layout item {text!r}: write options as kind:key=value:key=value, not {pair!r}")
        if key in options:
            raise ValueError(f"layout item {text!r} gives {key!r} twice")
        options[key] = parse_value(value)
    return Slot(kind, options)
