"""Numbers for a model that was built on meta and sharded: the bits of the whole one, however it is sharded.

Every parameter is drawn whole, as `Transformer.initialise` draws it, and a rank keeps its piece: the most that is whole
at once are the parameters of one module. A stream draws its parts from one generator, in order; so here every rank
draws them all, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from residua.model import Transformer
from residua.model.local import Started
from residua.model.transformer import named_generator, start


@torch.no_grad()
def materialise(model: Transformer, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """Give a model memory on a device, where it has none, and the numbers of `Transformer(config, seed=seed)`.

    They are drawn on the host, as those of a model that is built there and then moved.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    started = [module for module in model.modules() if isinstance(module, Started)]
    stds = model.starts()
    for name, parameter in model.named_parameters():
        if name in stds:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            start(whole, stds[name], seed, name)
            _put(parameter, whole)
    for module in started:
        with _whole(module):
            module.start()
    generator = named_generator(torch.empty(0), seed, "stream")
    for part in model.stream.modules():
        reset = getattr(part, "reset_parameters", None)
        if part is not model.stream and reset is not None:
            with _whole(part):
                reset(generator)
    return model


@contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Inside, a module's own parameters are whole, plain and on the host; afterwards its pieces have their numbers."""
    pieces = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, piece in pieces.items():
        module._parameters[name] = nn.Parameter(torch.empty(piece.shape, dtype=piece.dtype))
    yield
    for name, piece in pieces.items():
        made = module._parameters[name]
        module._parameters[name] = piece
        assert made is not None
        _put(piece, made.detach())


def _put(parameter: nn.Parameter, whole: Tensor) -> None:
    """A rank's piece of a whole tensor, which every rank has."""
    if isinstance(parameter, DTensor):
        piece = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(piece.to_local())
    else:
        parameter.copy_(whole)
