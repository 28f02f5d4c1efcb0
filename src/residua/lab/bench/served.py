"""Which kernels serve a design's own reads and writes, found by running them with trivial sublayers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from residua.lab.bench import stack
from residua.lab.bench.timing import Measured
from residua.ops import _backend


def served(design: str) -> Measured:
    """The ops that a design calls, by whether this device has a kernel; none, where torch's operations are all."""
    run = stack.ours(design, depth=4, width=64, tokens=16)
    with _asked() as found:
        run()
    return {
        "kernels": sorted(op for op, fast in found.items() if fast),
        "references": sorted(op for op, fast in found.items() if not fast),
    }


@contextmanager
def _asked() -> Iterator[dict[str, bool]]:
    """The ops that are asked for inside a `with`, and whether there is a kernel."""
    found: dict[str, bool] = {}
    before = _backend.registered

    def registered(op: str, device: str) -> tuple[str, Callable[..., Any]] | None:
        answer = before(op, device)
        found[op] = answer is not None
        return answer

    _backend.registered = registered
    try:
        yield found
    finally:
        _backend.registered = before
