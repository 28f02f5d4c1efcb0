"""x_k = gate_k sum_n softmax_n(query_k gain_k . v_n / rms(v_n)) v_n: several reads of the same sources in one call.

For decoding, where a read's arithmetic is nothing beside getting to it: no gradients, parameters taken where they lie,
and as little Python as is safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from residua.native.guard import Unsupported
from residua.native.library import TYPES, check, entry, threads
from residua.ops.attend import native
from residua.ops.norm import accumulator

_ADDRESS = 8  # bytes, and the items of an array("Q")


def together(
    queries: Sequence[Tensor],
    gains: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    nulls: Sequence[Tensor] = (),
    gates: Sequence[Tensor] = (),
    eps: float,
    heads: int = 1,
) -> tuple[Tensor, ...]:
    """One read a query. Queries and gains are [d], nulls and gates [1], of the accumulation type."""
    like, count = sources[0], len(queries)
    if not 2 <= count <= native.MOST_QUERIES:
        raise Unsupported(f"{count} reads at once; 2 to {native.MOST_QUERIES} can be made together")
    native.serves(queries[0], sources, None, heads)
    wide, width = accumulator(like.dtype), like.shape[-1]
    for group, numbers in ((queries, width), (gains, width), (nulls, 1), (gates, 1)):
        if group and len(group) != count:
            raise Unsupported(f"{len(group)} numbers for {count} queries")
        for one in group:
            fits = one.dtype is wide and one.numel() == numbers and one.is_contiguous() and one.is_cpu
            if not fits or one.is_neg() or one.data_ptr() % wide.itemsize:
                raise Unsupported(f"parameters that are not {numbers} numbers of {wide} in a row on the CPU")
    found = [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in range(count)]
    groups = (native.dense(sources), queries, gains, nulls, gates, found)
    table = array("Q", [one.data_ptr() for group in groups for one in group])
    at, place, size = [], table.buffer_info()[0], like.numel()
    for group in groups:
        at.append(place if group else None)
        place += _ADDRESS * len(group)
    run = entry("residua_attend_together", c_int, c_int, *(c_int64,) * 5, *(c_void_p,) * 5, c_double, c_void_p)
    check(
        run(
            TYPES[like.dtype], threads(size * len(sources) * count), size // width, width, heads, len(sources), count,
            *at[:5], eps, at[5],
        )
    )  # fmt: skip
    return tuple(found)
