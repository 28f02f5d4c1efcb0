"""predict(config, tokens): what a model costs, from its plan alone, in seconds and without allocating it.

The model is built and run on the meta device; `rules` prices what it calls. Nothing runs: `run_and_count` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua import ops
from residua.counting.shapes import unfilled
from residua.counting.walk import Walk
from residua.lab.cost.accounted import Accounted
from residua.lab.cost.fused import fused
from residua.model.config import ModelConfig
from residua.model.sublayers import Sublayer
from residua.model.transformer import Transformer
from residua.runner import Runner

PATHS = ("reference", "fused")
"""reference: the definitions of the ops, which write every step down; fused: what a kernel of each op has to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One forward over `batch` sequences of `tokens` tokens. `stream_` is the share of the residual design."""

    tokens: int
    batch: int
    parameters: int
    stream_parameters: int
    flops: float
    """A multiplication and an addition are two."""
    stream_flops: float
    bytes_moved: int
    """Inputs and outputs of every function: an upper bound, since caches and fusion save some of it."""
    stream_bytes_moved: int
    saved_bytes: int
    """Activations that autograd keeps for the backward pass: logits and loss not counted."""
    stream_saved_bytes: int
    state_bytes: int
    """The most that the state holds after any site."""
    cut_bytes: Mapping[str, int]
    """What a pipeline cut after each block sends, by the block's last site."""
    cache_bytes: int
    """Kept between decoding steps after `tokens` tokens, for all sequences; an encoder does not decode."""
    halo_bytes: int
    """What a rank must fetch from its left neighbour where the tokens are split between ranks: windows and tails."""
    key_value_bytes: int
    """What full attention adds to that: the keys and values of all earlier tokens, which no halo bounds."""

    @property
    def cut(self) -> int:
        """The dearest pipeline cut."""
        return max(self.cut_bytes.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"cut_bytes": dict(self.cut_bytes)}


def predict(
    config: ModelConfig,
    tokens: int = 1024,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    path: str = "reference",
    build: Callable[[ModelConfig], Transformer] = Transformer,
) -> Cost:
    """Predict what a configuration costs in one forward pass of `batch` sequences of `tokens` tokens.

    dtype: of parameters and activations.
    path:  reference, the plain PyTorch ops; or fused, a lower bound by ideal kernels.
    build: makes the model of a configuration, where its backbone is another than ours (`residua.lab.cost.targets`).

    Raises ValueError for an unknown path and for tokens or batch below 1, and NotImplementedError, with its name, for a
    function that has no cost rule.
    """
    if path not in PATHS:
        raise ValueError(f"path is {' or '.join(PATHS)}, not {path!r}")
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens={tokens} and batch={batch} must be at least 1")
    with unfilled():
        model = build(config).to(dtype)
    walk, ids = Walk(model.parameters()), torch.empty(batch, tokens, dtype=torch.long, device="meta")
    with torch.enable_grad(), fused(walk) if path == "fused" else ops.backend("reference"), walk:
        held, past = forward(model, ids, walk)
    sublayers = list(model.at_sites().values())  # one that runs twice costs twice
    ends = {block[-1].name for block in map(model.plan.block, range(model.plan.depth))}
    halo, unbounded = (sum(parts) for parts in zip(*(_halo(each, tokens) for each in sublayers), strict=True))
    width = dtype.itemsize
    return Cost(
        tokens=tokens,
        batch=batch,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stream_parameters=sum(parameter.numel() for parameter in model.stream.parameters()),
        flops=sum(walk.flops.values()),
        stream_flops=walk.flops["stream"],
        bytes_moved=walk.bytes_moved.total(),
        stream_bytes_moved=walk.bytes_moved["stream"],
        saved_bytes=walk.saved.total(),
        stream_saved_bytes=walk.saved["stream"],
        state_bytes=max(held.values()),
        cut_bytes={site: size for site, size in held.items() if site in ends},
        cache_bytes=batch * width * sum(each.cache_floats(tokens) for each in sublayers) + past if config.causal else 0,
        halo_bytes=batch * width * halo + past,
        key_value_bytes=batch * width * unbounded,
    )


def forward(model: Transformer, ids: Tensor, bill: Walk | None = None) -> tuple[dict[str, int], int]:
    """The model's loop, site by site: bytes of the state after each write, and of what the design keeps for later
    tokens."""
    runner = Runner(model.stream) if bill is None else Accounted(model.stream, bill)
    steps = list(model.walk(ids, runner))
    model.logits(steps[-1].read.lanes[0])
    past = model.stream.past(steps[-1].state)
    held = {step.site.name: state_nbytes(step.after) for step in steps[:-1]}
    return held, sum(leaf.nbytes for leaf in pytree.tree_leaves(past) if leaf is not None)


def state_nbytes(state: Any) -> int:
    """Bytes that a cut here sends: a tensor held twice is sent once."""
    return sum({id(leaf): leaf.nbytes for leaf in pytree.tree_leaves(state)}.values())


def _halo(sublayer: Sublayer, tokens: int) -> tuple[int, int]:
    """Numbers a sequence that the first token of a rank needs from the tokens before it: bounded, and not.

    A cache that grows with the tokens has no bound; the rest of it, a window or a tail, is the halo.
    """
    kept = sublayer.cache_floats(tokens)
    unbounded = tokens * (sublayer.cache_floats(tokens + 1) - kept)
    bounded, window = kept - unbounded, getattr(sublayer, "window", None)
    if window is not None and not unbounded:
        bounded -= bounded // window  # the current token of a window is at home
    return bounded, unbounded
