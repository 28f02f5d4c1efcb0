"""Which kernels serve a design's own reads and writes, found by running them with trivial sublayers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class _Watched(dict[tuple[str, str], Any]):
    """The table of kernels, which notes the ops that are looked up and whether each has one."""

    def __init__(self, kernels: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(kernels)
        self.asked: dict[str, bool] = {}

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        self.asked[key[0]] = key in self
        return super().get(key, default)


@contextmanager
def _asked() -> Iterator[dict[str, bool]]:
    """The ops that are asked for inside a `with`, and whether there is a kernel."""
    before, watched = _backend._kernels, _Watched(_backend._kernels)
    _backend._kernels = watched
    try:
        yield watched.asked
    finally:
        _backend._kernels = before
