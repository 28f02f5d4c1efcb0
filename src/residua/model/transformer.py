"""The backbone: a loop of reads, sublayers and writes. No design is named here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residua import ops
from residua.model.cache import Cache
from residua.model.config import ModelConfig
from residua.model.context import Context
from residua.model.local import Started
from residua.model.loop import Again
from residua.model.norms import LaneNorm, NoNorm
from residua.model.objective import read_loss, token_loss
from residua.model.places import follow, given, plain
from residua.model.projection import Projection
from residua.model.sublayers import Sublayer, make_sublayer
from residua.ops.window_attend.position import rotations
from residua.plan import Site
from residua.registry import build
from residua.runner import Execution, Flow, Runner, Step, detached, walk
from residua.stream import State, Stream


class Block(nn.Module):
    """The unit of checkpointing, sharding and pipeline cuts."""

    def __init__(self, config: ModelConfig, sites: tuple[Site, ...], stream: Stream) -> None:
        super().__init__()
        self.sites = sites  # of its first pass
        self.sublayers = nn.ModuleList(
            make_sublayer(config, site, slot, stream) for site, slot in zip(sites, config.slots, strict=True)
        )

    def forward(
        self, flow: Flow, runner: Runner, context: Context, sites: tuple[Site, ...] = (), begin: Again | None = None
    ) -> Flow:
        """sites, begin: of a later pass, and the sublayer that it begins with."""
        sublayers: Any = self.sublayers if begin is None else (begin, *self.sublayers)
        for site, sublayer in zip(sites or self.sites, sublayers, strict=True):
            read = runner.read(flow, site, sublayer.norm)
            flow = runner.write(flow, site, read, sublayer.answer(read, context))
        return flow

    def alone(self, state: State, *others: Any) -> State:
        """From a state to a state: the block between two cuts."""
        return Runner.cut(self(Flow(state), *others))


class Unembed(nn.Module):
    """x W': a module, so that a parallel style can hold on to what goes in and comes out."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.project(x, weight)


class Transformer(nn.Module):
    """Token ids to logits, through any residual design and any layout."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, trained: bool = False) -> None:
        """trained: weights are about to be loaded, so nothing is asked about how the model would start."""
        super().__init__()
        self.config, self.plan, self.execution = config, config.plan, Execution()
        self.stream = build(config.design, self.plan)
        self.embed = nn.Embedding(config.vocab, config.width)
        firsts = dict(reversed(self.plan.runs))
        self.blocks = nn.ModuleList(Block(config, firsts[block], self.stream) for block in range(config.depth))
        self.norm = LaneNorm(config.width, 1, config.eps) if self.stream.takes_norm(self.plan.head) else NoNorm()
        again = next((site for site in self.plan.sites if site.kind == "loop"), None)
        self.begin = None
        if again is not None and self.plan.loop is not None:
            self.begin = Again(config, again, self.plan.loop.between, self.norm)
        self.head = None if config.tied else Projection(config.width, config.vocab)
        self.unembed = Unembed()
        if not trained:
            self._refuse()
        self.initialise(seed)

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        documents: Int[Tensor, "b t"] | None = None,
        cache: Cache | None = None,
        checkpointed: bool = False,
        targets: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t vocab"] | Float[Tensor, ""]:
        """Logits for every position, or their loss.

        mask:         False where `ids` is padding; with a cache, on the left of a row alone.
        documents:    an id for every token. A run of equal ids is a document: its tokens see each other and no
                      others, and its positions count from its first. By default a row is one document, or goes on
                      with the one that the cache has open.
        cache:        what earlier tokens left; it takes the new ones in.
        checkpointed: recompute each block in the backward pass instead of keeping its activations.
        targets:      give back `token_loss` of the logits for these instead, without ever holding all logits.
        """
        context = self.context(ids, mask, cache, documents)
        if cache is not None and cache.margin and self.stream.mixes_tokens and ids.shape[1] > 1:
            return self._stepping(ids, mask, cache)
        runner = Runner(self.stream, self.execution, blockwise=checkpointed)
        x = self.embed(ids)
        flow = runner.open(x, None if cache is None else cache.past, ids)
        for layer, (block, sites) in enumerate(self.runs):
            around: tuple[Any, ...] = (runner, context)
            if self.plan.loop is not None:
                flow = detached(flow) if layer == self.plan.cut else flow
                around = (runner, self._lap(context, sites[0], x), sites, self._begin(sites))
            if checkpointed:
                flow = Flow(checkpoint(block.alone, runner.cut(flow), *around, use_reentrant=False))
            else:
                flow = block(flow, *around)
        if cache is not None:
            cache.advance(ids.shape[1], runner.past(flow), context.places)
        (x,) = runner.read(flow, self.plan.head, self.norm).lanes
        return self.logits(x) if targets is None else self.loss(x, targets)

    @property
    def runs(self) -> list[tuple[Block, tuple[Site, ...]]]:
        """Every block that runs, in order, and the sites of that run."""
        blocks: Any = self.blocks
        if self.plan.loop is None:
            return [(block, block.sites) for block in blocks]
        return [(blocks[block], sites) for block, sites in self.plan.runs]

    def at_sites(self) -> dict[int, Sublayer]:
        """The sublayer of every site, by the site's index; a block that repeats has several sites."""
        found: dict[int, Sublayer] = {}
        for block, sites in self.runs:
            begin = self._begin(sites)
            sublayers: Any = block.sublayers if begin is None else (begin, *block.sublayers)
            found |= {site.index: each for site, each in zip(sites, sublayers, strict=True)}
        return found

    def _begin(self, sites: tuple[Site, ...]) -> Again | None:
        return self.begin if sites[0].kind == "loop" else None

    def _lap(self, context: Context, site: Site, embedding: Tensor) -> Context:
        """What the sublayers of one pass share."""
        return replace(context, lap=site.lap, embedding=None if self.begin is None else embedding)

    def logits(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t vocab"]:
        """Of what the head reads, normalised."""
        return self.unembed(x, self.head_weight)

    def loss(self, x: Float[Tensor, "b t d"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """`token_loss` of their logits, of which only some are there at a time; all, where ranks split the matrix."""
        if hasattr(self.head_weight, "placements"):
            return token_loss(self.logits(x), targets)
        return read_loss(x, self.head_weight, targets)

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the head: the embedding, or its own."""
        return self.embed.weight if self.head is None else self.head.weight

    def walk(
        self, ids: Int[Tensor, "b t"], runner: Runner | None = None, between: Callable[[Flow], Flow] = lambda flow: flow
    ) -> Iterator[Step]:
        """One forward, site by site: `residua.runner.walk` with this model's norms and sublayers."""
        context, sublayers, x = self.context(ids), self.at_sites(), self.embed(ids)
        return walk(
            Runner(self.stream, self.execution) if runner is None else runner,
            x,
            lambda site, read: sublayers[site.index].answer(read, self._lap(context, site, x)),
            lambda site: self.norm if site.kind == "head" else sublayers[site.index].norm,
            between,
            ids,
        )

    def sublayers(self) -> Iterator[Sublayer]:
        """Every sublayer in reading order; its `site` says where it stands."""
        return (module for module in self.blocks.modules() if isinstance(module, Sublayer))

    def context(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Context:
        """What the sublayers of one forward share."""
        self._check_call(mask, cache, documents)
        before = 0 if cache is None else cache.length
        places = None
        if mask is not None or documents is not None or (cache is not None and cache.places is not None):
            known = None if cache is None else cache.places
            newest = plain(len(ids), before, ids.device) if known is None else known.last(1)
            said = given(ids.shape, mask, documents, newest)
            places = follow(newest, said)
            mask = said >= 0
        head_width = self.config.width // self.config.heads
        turned = head_width, self.config.rope_base, self.embed.weight.dtype
        if places is None and cache is not None:
            positions, rotation = cache.turns(ids.shape[1], *turned, ids.device)
        else:
            positions = torch.arange(ids.shape[1], device=ids.device) if places is None else places.positions
            rotation = rotations(positions, *turned)
        return Context(positions, rotation, self.config.causal, mask, cache, places)

    def _check_call(self, mask: Tensor | None, cache: Cache | None, documents: Tensor | None) -> None:
        """Refuse what would give a wrong answer."""
        if cache is not None:
            if not self.config.causal:
                raise ValueError("an encoder looks both ways and cannot decode with a cache")
            if torch.is_grad_enabled():
                raise ValueError("decode under torch.inference_mode() or torch.no_grad(): a cache keeps no graph")
            if mask is not None and bool(mask.long().diff(dim=1).lt(0).any()):
                raise ValueError("a cache aligns rows at their newest token; pad on the left")
        if documents is not None and self.stream.mixes_tokens:
            raise ValueError(f"{self.stream.spec} mixes tokens in its stream, and documents would leak into each other")
        if mask is not None and self.stream.mixes_tokens and bool(mask.long().diff(dim=1).gt(0).any()):
            raise ValueError(
                f"{self.stream.spec} mixes tokens in its stream, and padding before a token would leak into it; pad on "
                "the right"
            )

    def _stepping(self, ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """The last tokens one by one, so that the cache has what the design keeps after each of them."""
        first = max(0, ids.shape[1] - cache.margin)
        parts = [slice(0, first)] if first else []
        parts += [slice(place, place + 1) for place in range(first, ids.shape[1])]
        return torch.cat([self(ids[:, at], mask=None if mask is None else mask[:, at], cache=cache) for at in parts], 1)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Every parameter at its start: N(0, start_std^2), divided by sqrt(sublayers) for those that write.

        Each is drawn from a generator seeded by its own name, so that models of one seed share the weights of
        their sublayers to the last bit, whatever their designs.
        """
        stds = self.starts()
        for name, parameter in self.named_parameters():
            if name in stds:
                start(parameter, stds[name], seed, name)
        for module in self.modules():
            if isinstance(module, Started):
                module.start()
        self.stream.reset(named_generator(self.embed.weight, seed, "stream"))

    def starts(self) -> dict[str, float | None]:
        """The standard deviation of every parameter that is drawn at the start, by name; None for a gain, which is 1.

        Those of the stream and those of `Started` modules begin at values of their own, and are not here.
        """
        writers = {
            id(parameter): 0.0 if getattr(sublayer, "zero", False) else len(self.plan.sites) ** -0.5
            for sublayer in self.sublayers()
            for parameter in sublayer.writers()
        }
        started = [module for module in self.modules() if isinstance(module, Started)]
        settled = {id(parameter) for module in started for parameter in module.parameters()}
        return {
            name: None
            if name.rsplit(".", 2)[-2].endswith("norm")
            else self.config.start_std * writers.get(id(one), 1.0)
            for name, one in self.named_parameters()
            if not name.startswith("stream.") and id(one) not in settled
        }

    def _refuse(self) -> None:
        """Combinations that would not be what they say they are."""
        if self.stream.starts == "eps":
            most = max(len(self.stream.sources(site)) for site in self.plan.readers) or 1
            limit = 0.05 * (self.config.start_std / most) ** 2
            if self.config.eps > limit:
                raise ValueError(
                    f"{self.stream.spec} starts as the standard network only while eps is small beside the read: it "
                    f"averages up to {most} sources, so eps={self.config.eps:g} must be at most {limit:.1g} "
                    "(or raise init_std, or use fewer sources)"
                )
        if self.stream.reads_direction:
            for site, slot in zip(self.plan.block(0), self.config.slots, strict=True):
                if slot.options.get("start") == "zero":
                    raise ValueError(
                        f"{self.stream.spec} writes along the direction of a sublayer's output, and {site.name} starts "
                        "at zero, which has none; drop start=zero"
                    )


def start(parameter: Tensor, std: float | None, seed: int, name: str) -> None:
    """Put a parameter where `Transformer.starts` says that it begins."""
    if parameter.is_meta:  # it has no numbers, and drawing none of them takes torch its time
        return
    if std is None:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, std, generator=named_generator(parameter, seed, name))


def named_generator(like: Tensor, seed: int, name: str) -> torch.Generator | None:
    """A generator of its own for every name; none on the meta device, where nothing is drawn."""
    if like.device.type == "meta":
        return None
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(like.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
