"""One process per run directory. The lock is the kernel's: it goes with the process, however that ends.

`filelock` takes it and neither truncates nor removes the file, so that the holder's signature stays for others to read.
Where a file system has no such lock, that is an error: a marker file would outlive a killed process.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

NAME = "run.lock"


class RunLocked(OSError):
    """Another process is using the run directory."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory, or raise `RunLocked` with the name of the process that does."""
    path = folder / NAME
    if path.is_symlink():
        raise RunLocked(f"{path} is a symbolic link, and locking would write where it leads; remove it")
    lock = FileLock(path, blocking=False, fallback_to_soft=False, on_acquired=lambda handle: _sign(path, handle))
    try:
        lock.acquire()
    except Timeout:
        holder = _holder(path)
        raise RunLocked(f"{folder} is in use by {holder}; wait for it or choose another directory") from None
    try:
        yield
    finally:
        lock.release()


def _sign(path: Path, handle: int) -> None:
    named, held = path.lstat(), os.fstat(handle)
    if stat.S_ISLNK(named.st_mode) or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
        raise RunLocked(f"{path} was replaced while it was being locked; run the command again")
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(mine).encode())


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_bytes())
        return f"process {held['pid']} on {held['host']} since {held['since']}"
    except (OSError, ValueError, KeyError):  # it has not signed yet, or the system lets nobody read a locked file
        return "a process that has just started"
