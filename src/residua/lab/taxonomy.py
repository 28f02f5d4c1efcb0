"""Every design as one read: read_l = sum_{j in W(l)} a_lj u_j, and what its sources, weights and window are.

Nothing is declared for the map: each entry is found by running the design on a small plan, moving one thing at a time.
A design that is no such read is said to be none, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.counting.shapes import unfilled
from residua.plan import Plan, Site
from residua.registry import build, design, names
from residua.runner import walk
from residua.stream import Routing, State, Stream

DEPTH, WIDTH, TOKENS = 6, 8, 5
TOLERANCE = 1e-9

FIXED, STATIC, KEY, QUERY, BOTH, STATE = "fixed", "static", "key side", "query side", "both sides", "whole state"
"""How weights are made: constants; parameters; from the source they weigh; from the newest source; from both; from a
state that is one tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One design on the map."""

    design: str
    sources: str
    """What is mixed."""
    weights: str
    """One of the names above."""
    normalised: str
    """What the weights of a read add up to: 1, n, 0, at most 1, or nothing in particular (no)."""
    lanes: int
    """Mixtures of its own that a sublayer is fed: 3 for q, k and v."""
    window: str
    """`all`, or the most sources of a read."""
    injection: str
    instance: bool
    """Whether it is a read of this form."""
    why: str
    """The reason, where it is not, or not plainly."""

    @property
    def cell(self) -> str:
        """Its place on the grid of the two axes."""
        return f"{self.weights} / {'all' if self.window == 'all' else 'window'}" if self.instance else "recurrent"


def entries(specs: Sequence[str] | None = None) -> list[Entry]:
    """The map of these designs, of all registered ones by default."""
    return [entry(spec) for spec in specs or names()]


def variants() -> list[Entry]:
    """The registered designs, and of their option cases the first that stands elsewhere on the grid."""
    found: dict[tuple[str, str], Entry] = {}
    for name in names():
        for case in design(name).cases:
            one = entry(f"{name}:{case}" if case else name)
            found.setdefault((name, one.cell), one)
    return list(found.values())


@torch.no_grad()
def entry(spec: str) -> Entry:
    """The classification of one design: its sources, weights, window and injection, found by experiment."""
    probe = _Probe(spec)
    reads = probe.reads()
    if not reads:
        return probe.without_a_mixture()
    slots = probe.recurrent()
    return Entry(
        design=probe.stream.spec,
        sources=probe.stream.mixes,
        weights=probe.weights(reads),
        normalised=_sums(reads),
        lanes=max(len(read.routing.weights) for read in reads),
        window=f"{len(slots)} slot{'s' * (len(slots) > 1)}" if slots else probe.window(),
        injection=probe.injection(reads),
        instance=not slots,
        why="its sources are slots of a recurrent state, which every write changes: none of them is what a layer made"
        if slots
        else "",
    )


@dataclass(frozen=True, slots=True)
class Mixer:
    """A sublayer on the other axis: what it mixes is tokens."""

    kind: str
    weights: str
    window: str
    """`all`, or bounded."""


def mixers() -> list[Mixer]:
    """The sublayers that mix tokens, by what decoding keeps of them and whether a query makes their weights."""
    from residua.model import ModelConfig, Transformer
    from residua.model.sublayers import SUBLAYERS

    found = []
    for kind in SUBLAYERS:
        with unfilled():
            (sublayer,) = Transformer(ModelConfig(vocab=4, width=8, depth=1, heads=2, layout=kind)).sublayers()
        kept = sublayer.cache_floats(64)
        if kept:
            grows = sublayer.cache_floats(65) > kept
            found.append(Mixer(kind, BOTH if hasattr(sublayer, "q") else STATIC, "all" if grows else "bounded"))
    return found


class MixingSite(NamedTuple):
    """A site that reads a mixture."""

    state: State
    site: Site
    routing: Routing


class _Probe:
    """A design with random parameters on a small plan, and its states under random sublayers."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.plan = Plan.regular(WIDTH, DEPTH)
        self.stream: Stream = build(spec, self.plan).double()
        self.generator = torch.Generator().manual_seed(0)
        self.outputs = [self._random() for _ in self.plan.sites]
        self.embedding = self._random()
        self._stir()

    def _random(self) -> Tensor:
        return torch.randn(1, TOKENS, WIDTH, generator=self.generator, dtype=torch.float64)

    def _stir(self) -> None:
        """Parameters away from their start, where zeros and ones would hide what depends on what."""
        for parameter in self.stream.parameters():
            parameter.normal_(0.0, 0.5, generator=self.generator)

    def states(self) -> list[State]:
        """The state before every site, and after the last, with the same sublayer outputs each time."""
        return [step.state for step in walk(self.stream, self.embedding, lambda site, read: self.outputs[site.index])]

    def reads(self) -> list[MixingSite]:
        """Every site with a choice of sources, its state and its read taken apart; with one source, if none has two."""
        found = []
        for state, site in zip(self.states(), self.plan.readers, strict=True):
            routing = self.stream.routing(state, site) if self.stream.sources(site) else None
            if routing is not None:
                found.append(MixingSite(state, site, routing._replace(weights=routing.weights.clone())))
        return [read for read in found if len(read.routing.values) > 1] or found

    def weights(self, reads: Sequence[MixingSite]) -> str:
        """Move every tensor of a state in turn, and see whose weights follow."""
        own = other = whole = False
        for read in reads:
            leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(read.state)}.values()
            for moved in leaves:
                again = self._moved(read, moved)
                touched = {
                    place
                    for place, pair in enumerate(zip(read.routing.values, again.values, strict=True))
                    if _differ(*pair)
                }
                newest = len(read.routing.values) - 1 in touched  # it may be the query, and is a source as well
                for place in _followed(read.routing.weights, again.weights, touched):
                    own, other = own or (place in touched and not newest), other or place not in touched
                whole = whole or (len(leaves) == 1 and _differ(read.routing.weights, again.weights))
            other = other or self._interact(read)
        if whole:
            return STATE
        if own or other:
            return BOTH if own and other else KEY if own else QUERY
        before = reads[-1].routing.weights
        self._stir()
        return STATIC if _differ(before, self.reads()[-1].routing.weights) else FIXED

    def _moved(self, read: MixingSite, *moved: Tensor) -> Routing:
        """The read with some tensors of the state elsewhere, always in the same direction."""
        leaves, spec = pytree.tree_flatten(read.state)
        changed = [_shifted(leaf) if any(leaf is one for one in moved) else leaf for leaf in leaves]
        routing = self.stream.routing(pytree.tree_unflatten(changed, spec), read.site)
        assert routing is not None
        return routing

    def _interact(self, read: MixingSite) -> bool:
        """With two sources there is no third whose weight could follow: if the newest is the query, it changes what a
        move of the other does to their ratio."""
        values = read.routing.values
        held = {id(leaf): leaf for leaf in pytree.tree_leaves(read.state)}
        if len(values) != 2 or len(held) < 2 or not bool((read.routing.weights > 0).all()):
            return False
        older, newer = (
            next((one for one in held.values() if _differ(value, self._moved(read, one).values[place])), None)
            for place, value in enumerate(values)
        )
        if older is None or newer is None or older is newer:
            return False
        ratios = [
            (routing.weights[:, 0] / routing.weights[:, 1]).log()
            for routing in (
                read.routing, self._moved(read, older), self._moved(read, newer), self._moved(read, older, newer)
            )
        ]  # fmt: skip
        return _differ(ratios[3] - ratios[2], ratios[1] - ratios[0])

    def window(self) -> str:
        """`all` if the sources of a read keep growing with depth."""
        most = max(len(self.stream.sources(site)) for site in self.plan.readers)
        deeper = build(self.spec, Plan.regular(WIDTH, 3 * DEPTH))
        grown = max(len(deeper.sources(site)) for site in deeper.plan.readers)
        if grown > most:
            return "all"
        kept = {name for site in self.plan.readers for name in self.stream.sources(site)} & {"evicted", "middle"}
        return f"at most {most}" + (", one the sum of the dropped" if kept else "")

    def recurrent(self) -> tuple[str, ...]:
        """The names of the slots, if every site mixes the same ones and the embedding is none of them."""
        mixed = {self.stream.sources(site) for site in self.plan.sites if self.stream.sources(site)}
        (only,) = mixed if len(mixed) == 1 else ((),)
        return () if "embed" in only else only

    def injection(self, reads: Sequence[MixingSite]) -> str:
        """Added to the stream or in its place; and whether the stream itself ever holds the read."""
        added = any(isinstance(read.routing.base, Tensor) for read in reads)
        what = "added to the input" if added else "replaces the input"
        return what + ("; the stream holds it too" if self._holds(reads) else "; the stream never holds it")

    @torch.enable_grad()
    def _holds(self, reads: Sequence[MixingSite]) -> bool:
        """Whether the last state, with the outputs of all sublayers kept, depends on the very tensors of a read."""
        sites = {read.site for read in reads if read.site.kind != "head"}
        steps = list(walk(self.stream, self.embedding, lambda site, read: self.outputs[site.index]))
        found = [
            leaf for step in steps if step.site in sites for leaf in pytree.tree_leaves((step.lanes, step.read.carry))
        ]
        lanes = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.shape == self.embedding.shape]
        learned = [lane for lane in lanes if lane.requires_grad]
        total = sum((leaf.sum() for leaf in pytree.tree_leaves(steps[-1].state)), torch.zeros(()))
        if not learned or not total.requires_grad:
            return False
        slopes = torch.autograd.grad(total, learned, allow_unused=True)
        return any(slope is not None and bool(slope.abs().max() > TOLERANCE) for slope in slopes)

    def without_a_mixture(self) -> Entry:
        """The sum of all outputs, or no read of this form at all."""
        (state, after, *_), y = self.states(), self.outputs[0]
        plain = isinstance(state, Tensor) and state.shape == y.shape and not _differ(after - state, y)
        return Entry(
            design=self.stream.spec,
            sources="sublayer outputs (and the embedding)" if plain else self.stream.mixes,
            weights=FIXED if plain else "none",
            normalised="no",
            lanes=1,
            window="all" if plain else "none",
            injection="is the stream" if plain else "rewrites the stream",
            instance=plain,
            why="the sum: ones over outputs, or the newest alone over states; nothing is chosen"
            if plain
            else "no mixture is read: each write changes the state in place, by a rule that depends on the state",
        )


def _shifted(leaf: Tensor) -> Tensor:
    """A tensor of a state elsewhere, as wide as it is."""
    return leaf + torch.randn(leaf.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _differ(one: Tensor, two: Tensor) -> bool:
    return one.shape != two.shape or bool((one - two).abs().max() > TOLERANCE)


def _followed(before: Tensor, after: Tensor, touched: set[int]) -> Iterator[int]:
    """Sources whose weight moved, relative to one that was not touched where all are positive."""
    count = before.shape[1]
    if _sum_is(before, 0.0):  # a softmax less its mean
        before, after = before + 1 / count, after + 1 / count
    still = [place for place in range(count) if place not in touched]
    shares = bool((before > 0).all())  # of one softmax, perhaps: ratios of two do not see the others
    for place in range(count):
        if shares:
            other = next((one for one in still if one != place), None)
            if other is None:
                continue
            moved = _differ(before[:, place] / before[:, other], after[:, place] / after[:, other])
        else:
            moved = _differ(before[:, place], after[:, place])
        if moved:
            yield place


def _sum_is(weights: Tensor, value: float) -> bool:
    return bool((weights.sum(1) - value).abs().max() < TOLERANCE)


def _sums(reads: Sequence[MixingSite]) -> str:
    every = [(read.routing.weights, len(read.routing.values)) for read in reads]
    if all(_sum_is(weights, 1.0) for weights, _ in every):
        return "to 1"
    if all(_sum_is(weights, count) for weights, count in every):
        return "to n"
    if all(_sum_is(weights, 0.0) for weights, _ in every):
        return "to 0"
    below = all(bool((weights >= 0).all()) and bool((weights.sum(1) <= 1).all()) for weights, _ in every)
    return "to at most 1" if below else "no"
