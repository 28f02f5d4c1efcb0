"""The static geometry of a model: which sublayers read and write the stream, and in what order.

Nothing here knows a tensor: a plan can be built, printed, cut and counted without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

from residua.options import check_options
from residua.spec import Value, parse_value

MOST_SITES = 20_000
"""Sublayers of a plan. The deepest networks published have some thousand; far more is a slip of the hand, and would
take minutes to build before that showed."""

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
    """How many blocks have run before it, repeated ones counted every time; for the head, all of them."""
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
    block: int | None = None
    """The block whose weights it has, where blocks repeat; None: `layer`."""
    lap: int = 0
    """How many passes over its block come before this one."""
    name: str = field(init=False, compare=False)
    """`l3_attn`, `l3_attn2` for the second of a kind, `l3p1_attn` in the second pass over block 3, or `head`: one
    string for the parameter prefix, the report label and the pipeline key. Made once, because a token asks for it at
    every site."""

    def __post_init__(self) -> None:
        inner = f"{self.prefix}_{self.kind}" + (str(self.turn + 1) if self.turn else "")
        object.__setattr__(self, "name", "head" if self.kind == "head" else inner)

    @property
    def prefix(self) -> str:
        """That of its block and pass: `l3`, `l3p1`."""
        return f"l{self.layer if self.block is None else self.block}" + (f"p{self.lap}" if self.lap else "")


@dataclass(frozen=True, slots=True)
class Loop:
    """Blocks that run several times: the last item of a layout, `attn,mlp,loop:passes=4:blocks=2..5`."""

    passes: int
    first: int = 0
    last: int | None = None
    """The last block of the loop; None: of the model."""
    between: str = "none"
    """What a later pass begins with, as a sublayer of its own: nothing; `norm`: x becomes the final norm of x (Ouro);
    `add`: x + e with the embedding e; `linear`: A [x; e], A = [I 0] at the start (Huginn, looped nanochat)."""
    gradient: int | None = None
    """How many of the last passes have gradients; None: all."""
    stream: str = "own"
    """Whether every pass has parameters of the design of its own, or all share them."""

    BETWEEN = ("none", "norm", "add", "linear")
    STREAM = ("own", "shared")

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"loop: passes must be at least 1, not {self.passes}")
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise ValueError(f"loop: blocks={self.first}..{self.last} is no range of blocks; the first is 0")
        for key, known in (("between", self.BETWEEN), ("stream", self.STREAM)):
            if getattr(self, key) not in known:
                raise ValueError(f"loop: {key} takes {'|'.join(known)}, not {getattr(self, key)!r}")
        if self.gradient is not None and not 1 <= self.gradient <= self.passes:
            raise ValueError(f"loop: gradient must be 1..{self.passes}, the passes that have one, not {self.gradient}")

    @classmethod
    def parse(cls, text: str) -> Loop:
        """From `loop:passes=4:blocks=2..5`."""
        _, *pairs = text.strip().split(":")
        given: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not (key and equals and value) or key in given:
                raise ValueError(f"layout item {text!r}: write options once each as loop:key=value, not {pair!r}")
            given[key] = value
        unknown = given.keys() - {"passes", "blocks", "between", "gradient", "stream"}
        if unknown or "passes" not in given:
            raise ValueError(
                f"layout item {text!r}: write loop:passes=n and, after it, blocks=first..last, between=, gradient= or "
                "stream="
            )
        first, dots, last = given.pop("blocks", "0..").partition("..")
        try:
            given |= {key: int(given[key]) for key in ("passes", "gradient") if key in given}
            return cls(first=int(first), last=int(last) if last else None if dots else int(first), **given)
        except ValueError as error:
            raise ValueError(f"layout item {text!r}: {error}") from None


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
    loop: Loop | None = None
    """Which blocks repeat."""

    @classmethod
    def regular(
        cls,
        width: int,
        depth: int,
        layout: str | Sequence[str | Slot] = ("attn", "mlp"),
        *,
        vocab: int = 1,
        kv: tuple[int, int] | None = None,
        passes: int = 1,
        loop: range | None = None,
    ) -> Plan:
        """`depth` equal blocks of the sublayers in `layout`, then the head.

        vocab, kv:    what few designs ask for, the number of token ids, and heads and head width of attention's values
                      (one head of the whole width by default).
        passes, loop: run the blocks in `loop` (all by default) this often; a layout with a `loop` item says it too.
        """
        for name, value in (("width", width), ("depth", depth)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"{name} is a whole number, not {value!r}")
        if width < 1:
            raise ValueError(f"a plan needs a width of at least 1, not {width}")
        if depth < 1:
            raise ValueError(f"a plan needs at least one block, not depth={depth}")
        layout, looped = split_loop(layout)
        if passes != 1 or loop is not None:
            if looped is not None:
                raise ValueError("give passes and loop, or a loop in the layout, not both")
            looped = Loop(passes, *((loop.start, loop.stop - 1) if loop is not None else ()))
        kinds = [slot.kind for slot in parse_layout(layout)]
        count = depth * len(kinds) * (1 if looped is None else looped.passes)
        if count > MOST_SITES:
            raise ValueError(
                f"depth={depth} with {len(kinds)} in a block is {count:,} sublayers; a plan has {MOST_SITES:,} at most"
            )
        sites: list[Site] = []
        runs = _runs(depth, looped)
        for layer, (block, lap) in enumerate(runs):
            opening = looped is not None and lap > 0 and block == looped.first and looped.between != "none"
            inside = (["loop"] if opening else []) + kinds
            before = len(sites)
            sites += (
                Site(
                    index=before + place,
                    layer=layer,
                    kind=kind,
                    first=place == 0,
                    last=place == len(inside) - 1,
                    lanes=LANES.get(kind, 1),
                    turn=inside[:place].count(kind),
                    block=None if looped is None else block,
                    lap=lap,
                )
                for place, kind in enumerate(inside)
            )
        head = Site(len(sites), len(runs), "head", first=True, last=True)
        return cls(width, tuple(sites), head, vocab, kv or (1, width), looped)

    @property
    def depth(self) -> int:
        """How many Transformer blocks run, repeated ones counted every time."""
        return self.head.layer

    @property
    def runs(self) -> tuple[tuple[int, tuple[Site, ...]], ...]:
        """For every block that runs, in order: which it is, and its sites."""
        blocks = [self.block(layer) for layer in range(self.depth)]
        return tuple(
            (site.layer if site.block is None else site.block, sites) for sites in blocks for site in sites[:1]
        )

    @property
    def cut(self) -> int | None:
        """The layer before which gradients end; None for nowhere."""
        if self.loop is None or self.loop.gradient is None or self.loop.gradient == self.loop.passes:
            return None
        lap = self.loop.passes - self.loop.gradient
        return next(site.layer for site in self.sites if site.lap == lap)

    @property
    def readers(self) -> tuple[Site, ...]:
        """Every site that reads: the sublayers, then the head."""
        return (*self.sites, self.head)

    def block(self, layer: int) -> tuple[Site, ...]:
        """The sites of one Transformer block, counted as `Site.layer` does."""
        return tuple(site for site in self.sites if site.layer == layer)

    def site(self, name: str) -> Site:
        """The site called `name`."""
        for site in self.readers:
            if site.name == name:
                return site
        raise KeyError(f"no site {name!r}; this plan has {', '.join(site.name for site in self.readers)}")


def _runs(depth: int, loop: Loop | None) -> list[tuple[int, int]]:
    """Every block that runs, and in which of its passes."""
    if loop is None:
        return [(block, 0) for block in range(depth)]
    last = depth - 1 if loop.last is None else loop.last
    if last >= depth or loop.first >= depth:
        raise ValueError(f"loop: blocks={loop.first}..{last} is not within the blocks 0..{depth - 1} of this model")
    before, inside, after = range(loop.first), range(loop.first, last + 1), range(last + 1, depth)
    looped = [(block, lap) for lap in range(loop.passes) for block in inside]
    return [*((block, 0) for block in before), *looped, *((block, 0) for block in after)]


def split_loop(layout: str | Sequence[str | Slot]) -> tuple[Sequence[str | Slot], Loop | None]:
    """A layout without its `loop` item, and that loop."""
    items = layout.split(",") if isinstance(layout, str) else list(layout)
    loops = [item for item in items if isinstance(item, str) and item.strip().partition(":")[0] == "loop"]
    if not loops:
        return items, None
    if len(loops) > 1 or items[-1] is not loops[0]:
        raise ValueError(f"layout {','.join(map(str, items))!r}: one loop, at the end, says which blocks repeat")
    return items[:-1], Loop.parse(loops[0])


def parse_layout(layout: str | Sequence[str | Slot]) -> tuple[Slot, ...]:
    """`"swa:window=16,attn,mlp"` as slots; an unknown kind is an error that names the known ones."""
    items = layout.split(",") if isinstance(layout, str) else list(layout)
    slots = tuple(item if isinstance(item, Slot) else _parse_slot(item) for item in items)
    if not slots:
        raise ValueError("a layout needs at least one sublayer, such as attn,mlp")
    for slot in slots:
        if slot.kind == "loop":
            raise ValueError(
                "blocks of this model run once; a loop needs a model of residua's own, such as `train` makes"
            )
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
