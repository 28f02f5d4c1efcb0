"""Reads in groups, by the kernels of the sources' device: there is no other form of them.

ahead     several queries over the sources there are: what each read, and the sources to go on with
merge     one query over the sources that came since, and what it had read
together  several complete reads at once, without gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.native import guard
from residua.native.library import available
from residua.ops._backend import choice, kernel, registered
from residua.ops.attend import cpu
from residua.ops.attend.native import Carry
from residua.ops.attend.together import together as together_on_cpu

kernel("attend_ahead", "cpu", "cpu")(cpu.ahead)
kernel("attend_merge", "cpu", "cpu")(cpu.merge)
kernel("attend_together", "cpu", "cpu")(together_on_cpu)


def groupable(source: Tensor) -> bool:
    """Whether `ahead`, `merge` and, outside compiled code, `together` may be called for sources like this one now; they
    still say what they cannot serve by `Unsupported`."""
    name, _ = registered("attend_ahead", source.device.type) or (None, None)
    if name is None or choice() not in ("auto", name):
        return False
    if name == "cpu":
        if guard.watched() and not torch.compiler.is_compiling():  # a mode that counts sees the reads of the equation
            return False
        return not guard.only_torch(source) and available()
    return not guard.transformed() and not torch.compiler.is_compiling()


def carries(source: Tensor) -> bool:
    """Whether reads of such sources can be carried, which they are in the accumulation type."""
    name, _ = registered("attend_ahead", source.device.type) or (None, None)
    return name != "cpu" or source.dtype in cpu.CARRIED


def ahead(
    queries: Tensor, sources: tuple[Tensor, ...], nulls: Tensor | None = None, *, eps: float, heads: int = 1
) -> tuple[tuple[Carry, ...], tuple[Tensor, ...]]:
    """What each of the queries [k d], with its null [k], reads from the sources so far, for `merge`; and the sources.

    Those are to be used from here on: gradients of reads that use them arrive here, and leave with this pass's added.
    """
    return _kernel("attend_ahead", sources[0])(queries, sources, nulls, eps=eps, heads=heads)


def merge(
    carry: Carry, query: Tensor, sources: tuple[Tensor, ...], *, eps: float, heads: int = 1, scale: float = 1
) -> Tensor:
    """`scale` times the read over the carry's sources and these together; of none, in the type of the carry."""
    return _kernel("attend_merge", carry.value)(carry, query, sources, eps=eps, heads=heads, scale=scale)


def together(queries: Sequence[Tensor], gains: Sequence[Tensor], sources: Sequence[Tensor], **options: Any) -> Any:
    """One read a query, without gradients: `together.together`."""
    return _kernel("attend_together", sources[0])(queries, gains, sources, **options)


def _kernel(op: str, like: Tensor) -> Callable[..., Any]:
    found = registered(op, like.device.type)
    if found is None:
        raise guard.Unsupported(f"no kernel reads in groups on {like.device.type}")
    return found[1]
