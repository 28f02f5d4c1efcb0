"""Which numbers are bfloat16: sublayers compute in it under autocast, and the stream is what the config says.

Under autocast alone the stream would be whatever the sums promote to: float32 in one design, bfloat16 in another,
both in a third. Here the state between sites is one type, by construction: bfloat16, or float32 with `fp32_stream`,
which also keeps the design's own reads and writes out of autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.lab.train.config import TrainConfig
from residua.lab.train.recipe import Recipe
from residua.model import Transformer


def autocast(config: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context of every forward pass."""
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def set_stream_type(config: TrainConfig, model: Transformer) -> None:
    """Hold the state of a model's stream, from `open` to the head, in the type the config names."""
    if config.dtype == "float32":
        return
    stream: Any = model.stream
    device = model.embed.weight.device.type
    opened, read, write = stream.open, stream.read, stream.write
    dtype = torch.float32 if config.fp32_stream else torch.bfloat16
    own = partial(torch.autocast, device, enabled=False) if config.fp32_stream else nullcontext

    def typed_open(x: Tensor, past: Any = None) -> Any:
        with own():
            return _cast(opened(x.to(dtype), past), dtype)

    def typed_read(state: Any, site: Any, norm: Any) -> Any:
        def wide(*lanes: Tensor) -> Any:
            # gains are float32, and only like types have a fused norm; the projections narrow its result again
            return norm(*(lane.float() for lane in lanes))

        with own():
            return read(state, site, wide)

    def typed_write(state: Any, site: Any, read: Any, y: Tensor) -> Any:
        with own():
            return _cast(write(state, site, read, y.to(dtype)), dtype)

    stream.open, stream.read, stream.write = typed_open, typed_read, typed_write


def _cast(state: Any, dtype: torch.dtype) -> Any:
    """Every number of a state in one type; what the state holds twice stays one tensor."""
    leaves, shape = pytree.tree_flatten(state)
    cast = {id(leaf): leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves}
    return pytree.tree_unflatten([cast[id(leaf)] for leaf in leaves], shape)
