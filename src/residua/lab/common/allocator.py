"""An allocator that keeps its pages: what a training step frees, the next takes again.

glibc hands every block above some size back to the kernel, and the next step faults the same pages in again, one by one
and zeroed: a third of a step of 6 x 64. Nothing that is computed changes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The numbers of malloc.h."""
KEPT, USUAL = (1 << 30, 1 << 30), (1 << 26, 1 << 25)
"""Thresholds of trimming and of mapping: those that keep pages, and those that glibc itself arrives at."""


def keep_pages() -> bool:
    """Keep freed memory in this process from now on; whether it does.

    Only glibc is asked, and not where GLIBC_TUNABLES already says what its allocator shall do.
    """
    return "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", "") and _set(*KEPT)


@contextmanager
def returning_pages() -> Iterator[None]:
    """Inside a `with`, hand large blocks back to the kernel as glibc does by itself, in a process that keeps them."""
    _set(*USUAL)
    try:
        yield
    finally:
        _set(*KEPT)


def _set(trim: int, mapped: int) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return mallopt(TRIM_THRESHOLD, trim) == 1 and mallopt(MMAP_THRESHOLD, mapped) == 1
