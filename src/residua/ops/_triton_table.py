"""The addresses of separate tensors, in a tensor that a kernel reads them from.

They get to the device as arguments of a small kernel. A copy from the host would make a CUDA graph replay what the host
memory held long ago; a launch keeps its arguments, and a graph that replays it writes the same addresses.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host

_AT_ONCE = 16


# an address is neither a constant nor known to be aligned: each would compile the kernel once more
@triton.jit(do_not_specialize=[f"place_{i}" for i in range(_AT_ONCE)])
def _table_kernel(
    table,
    place_0: tl.int64, place_1: tl.int64, place_2: tl.int64, place_3: tl.int64,
    place_4: tl.int64, place_5: tl.int64, place_6: tl.int64, place_7: tl.int64,
    place_8: tl.int64, place_9: tl.int64, place_10: tl.int64, place_11: tl.int64,
    place_12: tl.int64, place_13: tl.int64, place_14: tl.int64, place_15: tl.int64,
):  # fmt: skip
    tl.store(table + 0, place_0)
    tl.store(table + 1, place_1)
    tl.store(table + 2, place_2)
    tl.store(table + 3, place_3)
    tl.store(table + 4, place_4)
    tl.store(table + 5, place_5)
    tl.store(table + 6, place_6)
    tl.store(table + 7, place_7)
    tl.store(table + 8, place_8)
    tl.store(table + 9, place_9)
    tl.store(table + 10, place_10)
    tl.store(table + 11, place_11)
    tl.store(table + 12, place_12)
    tl.store(table + 13, place_13)
    tl.store(table + 14, place_14)
    tl.store(table + 15, place_15)


def addresses(tensors: Sequence[Tensor | None], where: Tensor) -> Tensor:
    """The tensors' addresses, 0 for None, on the device of `where`: the caller keeps them alive until the launch."""
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    places += [0] * (-len(places) % _AT_ONCE)
    found = torch.empty(len(places), dtype=torch.int64, device=where.device)
    for first in range(0, len(places), _AT_ONCE):
        host.launch(_table_kernel, (1,), where, found[first:], *places[first : first + _AT_ONCE], warps=1)
    return found
