"""Ctrl-C, SIGTERM and a closed terminal ask the loop to stop where it can save; a second one does not wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from residua.lab.train.ranks import Agreed

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks a process to end: Ctrl-C, a system that shuts down, a terminal that was closed."""


class Interrupted(Agreed):
    """Training stopped because a signal asked for it; all work up to `step` is saved."""

    def __init__(self, number: int, step: int, steps: int, checkpoint: str) -> None:
        self.signal, self.step = signal.Signals(number), step
        super().__init__(
            f"stopped by {self.signal.name} after step {step} of {steps}, saved as {checkpoint}; "
            "run the same command to continue"
        )

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as a shell reports it."""
        return 128 + self.signal


class Interrupts:
    """Inside a `with`, the signals set `caught`. Outside the main thread signals cannot be had: nothing is set.

    Those that `heard` leaves out stay as they are.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in heard()}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._put_back()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def heard() -> list[int]:
    """What this process should listen to: all of `ENDING`, but for a closed terminal under `nohup`.

    That SIGINT is ignored says nothing: a shell does so to whatever it starts in the background, and somebody who sends
    the signal to such a process means it.
    """
    hangup = getattr(signal, "SIGHUP", None)
    return [number for number in ENDING if number != hangup or signal.getsignal(number) is not signal.SIG_IGN]
