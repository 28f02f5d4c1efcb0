"""What a run costs: seconds and processor seconds of its updates, and the most memory it had. None of it repeats."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Adds up the time of the updates; validation, saving and waiting do not count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = self.cpu_seconds = 0.0
        self._last = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):  # not every system lets a process forget its peak; then it is the process's
                _RESET.write_text("5")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is inside."""
        begun, cpu = time.perf_counter(), time.process_time()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._last = time.perf_counter() - begun
        self.seconds += self._last
        self.cpu_seconds += time.process_time() - cpu

    def reading(self, tokens: int) -> dict[str, float]:
        """Seconds so far, and the speed of the last update, which saw `tokens`."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_second": tokens / self._last if self._last else 0.0,
        }

    def peak_memory(self) -> int:
        """Bytes: of the device, or of the whole process on a processor."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with suppress(OSError, AttributeError):
            found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
            return int(found.group(1)) * 1024  # type: ignore[union-attr]  # no match is the AttributeError
        import resource  # only where there is no /proc: Windows has neither

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
