"""What several ranks wrote, read back: into given tensors, pieces or whole, or assembled as one process has it.

`torch.distributed.checkpoint` finds the pieces by the headers of their safetensors files; nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

RNG = "rng.safetensors"
"""The random states, of rank 0."""


def stored(path: Path) -> Mapping[str, Any]:
    """The size and type of every tensor of a checkpoint of either format, by name."""
    return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata


def read_into(path: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill tensors from a checkpoint of either format. alone: this process reads by itself, without the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process that loads alone, which is meant
        loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)


def assembled(path: Path) -> dict[str, dict[str, Tensor]]:
    """All tensors of a checkpoint in pieces, whole, by part: what one process would have saved."""
    rng = random_states_of(path)
    held = {name: meta for name, meta in stored(path).items() if name not in rng}
    whole = {name: torch.empty(tuple(meta.size), dtype=meta.properties.dtype) for name, meta in held.items()}
    read_into(path, whole, alone=True)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rng": rng}
    for name, tensor in whole.items():
        parts["optimizer" if "/" in name else "model"][name] = tensor
    return parts


def random_states_of(path: Path) -> dict[str, Tensor]:
    """Those that a checkpoint of either format keeps."""
    return load_file(path / RNG)
