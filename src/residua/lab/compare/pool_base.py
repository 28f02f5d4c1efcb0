"""What every pool is: it starts runs, says whether they live, and asks them to save and end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from residua.lab.compare.work import Work

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read once, when a process starts."""


class Started(Protocol):
    """A run that a pool has begun, or has in its queue."""

    def running(self) -> bool:
        """Whether it is still to be waited for."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it now."""


class Pool(ABC):
    """Somewhere to run."""

    parallel: int | None = None
    """Runs at a time where nobody says how many; None: all of them."""
    queues = True
    """Whether what it has no room for waits in a queue."""
    restarts = 3
    """How often a run whose process was killed is started again; it goes on from its newest checkpoint."""
    pause = 0.2
    """Seconds between two looks at the runs."""

    @abstractmethod
    def start(self, work: Work) -> Started:
        """Begin a run, or put it in the queue."""

    def close(self) -> None:  # noqa: B027  # most have nothing to let go of
        """Let go of the cluster; every run has ended."""


def environment(threads: int) -> dict[str, str]:
    """The variables that decide how many threads a process has."""
    return dict.fromkeys(THREADS, str(threads))
