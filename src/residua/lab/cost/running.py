"""run_and_count(config, tokens): the costs of `predict`, found by running the model here with `counter` watching.

The ops run their references, whatever kernels are there: those define what is counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua import ops
from residua.lab.common.files import Values
from residua.lab.cost.counter import OperatorCounter, SavedTensors
from residua.model.cache import Cache
from residua.model.config import ModelConfig
from residua.model.transformer import Transformer
from residua.plan import Site
from residua.runner import Observer, observed
from residua.stream import State

LIMIT = 2 << 30
"""Bytes of parameters above which `run_and_count` refuses."""


def run_and_count(config: ModelConfig, tokens: int = 1024, *, batch: int = 1) -> Values:
    """Run one forward with gradients and one that decodes; what they did, by the names of `Cost`.

    `halo_bytes` and the shares of the design are not here: they are not measured.
    """
    with torch.device("meta"):
        needed = 4 * sum(parameter.numel() for parameter in Transformer(config).parameters())
    if needed > LIMIT:
        raise ValueError(
            f"measuring allocates the model: {needed / 2**30:.0f} GiB of parameters, and the limit is "
            f"{LIMIT >> 30} GiB; measure a smaller --size"
        )
    model = Transformer(config)
    ids = torch.randint(config.vocab, (batch, tokens), generator=torch.Generator().manual_seed(0))
    counter, saved = OperatorCounter(), SavedTensors(model.parameters())
    states = _States()
    with ops.backend("reference"), torch.enable_grad(), observed(model.stream, states), saved, counter:
        model(ids)
    held = states.held
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stream_parameters": sum(parameter.numel() for parameter in model.stream.parameters()),
        "flops": counter.flops,
        "bytes_moved": counter.bytes_moved,
        "saved_bytes": saved.nbytes,
        "state_bytes": max(held.values()),
        "cut_bytes": {site.name: held[site.name] for site in model.plan.sites if site.last},
    }
    if config.causal:
        cache = Cache()
        with ops.backend("reference"), torch.inference_mode():
            model(ids, cache=cache)
        found["cache_bytes"] = _numbers(cache)
    return found


class _States(Observer):
    """Bytes of the state after every write."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def wrote(self, site: Site, y: Tensor, state: State) -> None:
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(state)}  # a tensor held twice counts once
        self.held[site.name] = sum(leaf.nbytes for leaf in leaves.values())


def _numbers(cache: Cache) -> int:
    """Bytes of keys, values, tails and the design's past; the positions of a ring are bookkeeping."""
    kept = [tensor for memory in cache._slots.values() for tensor in memory.tensors()]
    kept += [leaf for leaf in pytree.tree_leaves(cache.past) if leaf is not None]
    return sum(tensor.nbytes for tensor in kept if tensor.is_floating_point())
