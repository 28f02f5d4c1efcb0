"""What a model costs, from its configuration alone: parameters, operations and state, without allocating it.

The model is built on the meta device and its stream is walked there, so that every design is counted by what it
does and none needs a formula of its own. The sublayers are counted as papers do it: their matrices and the scores that
a token needs. `residua.lab.cost` counts every step of every function, and memory and traffic too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.utils import _pytree as pytree

from residua import ops
from residua.counting.shapes import unfilled
from residua.counting.walk import Walk
from residua.model.config import ModelConfig
from residua.model.norms import LaneNorm
from residua.model.transformer import Transformer
from residua.runner import walk
from residua.stream import State, Stream


class Sizes:
    """Counts for one model and sequence length, each made when it is first asked for. A multiplication and an addition
    are two operations."""

    def __init__(self, model: Transformer, tokens: int) -> None:
        """model: on the meta device, or any other: only shapes are looked at."""
        self._model, self._tokens = model, tokens

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(p.numel() for p in self._model.parameters())

    @cached_property
    def stream_parameters(self) -> int:
        """Those of the residual design."""
        return sum(p.numel() for p in self._model.stream.parameters())

    @cached_property
    def flops_per_token(self) -> float:
        """One forward, head included."""
        model, config = self._model, self._model.config
        sublayers = list(model.at_sites().values())  # one that runs twice costs twice
        norms = [model.norm, *(norm for each in sublayers for norm in (each.norm, each.out_norm))]
        norm_flops = 4 * config.width * sum(isinstance(norm, LaneNorm) for norm in norms)
        head = 2 * config.width * config.vocab
        of_sublayers = sum(sublayer.flops(self._tokens) for sublayer in sublayers)
        return of_sublayers + self.stream_flops_per_token + norm_flops + head

    @cached_property
    def stream_flops_per_token(self) -> float:
        """The design's own reads and writes."""
        return _stream_flops(self._model.stream, 2) - _stream_flops(self._model.stream, 1)

    @cached_property
    def state_floats(self) -> Mapping[str, int]:
        """Numbers per token in the state after each site's write: what a pipeline cut there sends."""
        return state_floats(self._model.stream)

    @cached_property
    def cache_floats(self) -> int:
        """Numbers per sequence that decoding keeps after `tokens` tokens: keys, values, windows, tails, past."""
        return _cache_floats(self._model, self._tokens)

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> dict[str, int]:
        """`state_floats` in bytes."""
        return {site: floats * dtype.itemsize for site, floats in self.state_floats.items()}


def sizes_of(config: ModelConfig, tokens: int = 1024) -> Sizes:
    """Count a configuration at a sequence length."""
    with unfilled():
        return Sizes(Transformer(config), tokens)


def state_floats(stream: Stream) -> dict[str, int]:
    """Numbers per token in the state after each write; a tensor held twice is sent once.

    Two sequence lengths are walked and subtracted: what a design keeps per sequence drops out.
    """
    with torch.device("meta"), torch.no_grad():
        (two, _), (one, _) = _walk(stream, 2), _walk(stream, 1)
    return {site: two[site] - one[site] for site in two}


def _stream_flops(stream: Stream, tokens: int) -> float:
    walk = Walk(stream.parameters())
    with torch.device("meta"), ops.backend("reference"), walk:
        _walk(stream, tokens)
    return sum(walk.flops.values())


def _walk(stream: Stream, tokens: int) -> tuple[dict[str, int], State]:
    """Run the stream with sublayers that do nothing: the numbers in its state after each write, and the last state."""
    x = torch.empty(1, tokens, stream.plan.width)
    steps = list(walk(stream, x, lambda site, read: torch.empty(x.shape)))
    return {step.site.name: state_numbers(step.after) for step in steps[:-1]}, steps[-1].state


def state_numbers(state: State) -> int:
    """Numbers that a state holds; a tensor held twice counts once."""
    return sum({id(leaf): leaf.numel() for leaf in pytree.tree_leaves(state)}.values())


def _cache_floats(model: Transformer, tokens: int) -> int:
    """What the sublayers and the design keep after `tokens` tokens of one sequence."""
    kept = sum(sublayer.cache_floats(tokens) for sublayer in model.at_sites().values())
    if not model.stream.mixes_tokens:
        return kept
    with torch.device("meta"), torch.no_grad():
        past = model.stream.past(_walk(model.stream, 1)[1])
    return kept + sum(leaf.numel() for leaf in pytree.tree_leaves(past) if leaf is not None)
