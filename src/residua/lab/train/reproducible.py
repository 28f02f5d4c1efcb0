"""Same config, same numbers: seeded and isolated random states, deterministic kernels, a fixed number of threads."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.lab.train.recipe import Recipe


def device_of(config: Recipe) -> torch.device:
    """The device a config trains on."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no CUDA device; use device=auto or device=cpu")
    return torch.device(config.device)


def memory_of(device: torch.device, processes: int) -> int:
    """Bytes that one of these processes may fill: all of its device, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(processes)))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here
    except (AttributeError, ValueError, OSError):  # a system without sysconf
        return 8 << 30


@contextmanager
def reproducible(config: Recipe) -> Iterator[None]:
    """Everything global that training depends on, set from the config and put back afterwards."""
    states, threads = random_states(), torch.get_num_threads()
    strict, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if device_of(config).type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
        if not strict:
            torch.use_deterministic_algorithms(True)
            # filling fresh memory guards against reading it, at a cost; no kernel here does
            memory.fill_uninitialized_memory = False
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        set_random_states(states)


def random_states() -> dict[str, Tensor]:
    """The state of every global random generator, as tensors."""
    version, words, gauss = random.getstate()
    held: Any = np.random.get_state(legacy=False)
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(held["state"]["key"].astype(np.int64)),
        "numpy.position": torch.tensor([held["state"]["pos"], held["has_gauss"]], dtype=torch.int64),
        "numpy.gauss": torch.tensor([held["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` gave."""
    version, *words = states["python"].tolist()
    gauss = states["python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss = states["numpy.position"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": states["numpy.gauss"].item(),
        }
    )
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for name, state in states.items():
            if name.startswith("cuda"):
                torch.cuda.set_rng_state(state, int(name.removeprefix("cuda")))
