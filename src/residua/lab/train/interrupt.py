"""Ctrl-C and SIGTERM ask the loop to stop where it can save; a second one does not wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from residua.lab.train.ranks import Agreed


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
    """Inside a `with`, the two signals set `caught`. Outside the main thread signals cannot be had: nothing is set."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in self.NUMBERS}
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
