"""An allocator that keeps its pages: what a training step frees, the next takes again.

glibc hands every block above some size back to the kernel, and the next step faults the same pages in again, one by one
and zeroed: a third of a step of 6 x 64. Nothing that is computed changes.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The numbers of malloc.h."""
LARGE = 1 << 30


def keep_pages() -> bool:
    """Keep freed memory in this process from now on; whether it does.

    Only glibc is asked, and not where GLIBC_TUNABLES already says what its allocator shall do.
    """
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(which, LARGE) == 1 for which in (TRIM_THRESHOLD, MMAP_THRESHOLD))
