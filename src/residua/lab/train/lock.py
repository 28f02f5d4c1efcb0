"""One process per run directory. The lock is the kernel's: it goes with the process, however that ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "run.lock"


class RunLocked(OSError):
    """Another process is using the run directory."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory, or raise `RunLocked` with the name of the process that does."""
    handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _acquire(handle):
            raise RunLocked(f"{folder} is in use by {_holder(handle)}; wait for it or choose another directory")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(mine).encode())
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        held = json.loads(os.read(handle, 4096))
        return f"process {held['pid']} on {held['host']} since {held['since']}"
    except (ValueError, KeyError):  # it has the lock and has not signed it yet
        return "a process that has just started"


if sys.platform == "win32":
    import msvcrt

    def _acquire(handle: int) -> bool:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the text, which others must be able to read
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _acquire(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
