"""Where measurements run: the processor by default, its time that of the process; a GPU, whose work is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_current = torch.device("cpu")


def current() -> torch.device:
    """The device that inputs and models are put on."""
    return _current


@contextmanager
def measuring_on(device: torch.device) -> Iterator[None]:
    """Measure there, until the end of the `with`."""
    global _current
    before, _current = _current, device
    try:
        yield
    finally:
        _current = before


def now() -> float:
    """Seconds: of this process, whatever its neighbours do; with a GPU of the clock, once it has done all its work."""
    if _current.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(_current)
    return time.perf_counter()
