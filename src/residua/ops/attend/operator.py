"""The depth read as an operator of torch.library: what a compiler, an exporter or a dispatch mode sees of it.

Eager code goes through `cpu`, whose dispatch is several times cheaper than that of an operator with a list of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops.attend import native
from residua.ops.attend.native import Carry, ReadOptions
from residua.ops.norm import accumulator


def attend(
    query: Tensor, sources: tuple[Tensor, ...], null: Tensor | None, eps: float, heads: int, total: bool, centered: bool
) -> Tensor:
    """`reference.attend`."""
    return _attend(query, list(sources), null, eps, heads, total, centered)[0]


# schemas are written out: under jaxtyping's import hook annotations cannot be read back
@torch.library.custom_op(
    "residua::attend",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor[] sources, Tensor? null, float eps, int heads, bool total, bool centered)"
    " -> (Tensor, Tensor)",
)
def _attend(
    query: Tensor, sources: list[Tensor], null: Tensor | None, eps: float, heads: int, total: bool, centered: bool
) -> tuple[Tensor, Tensor]:
    """The read and its log-sum."""
    native.serves(query, sources, null, heads)
    read = native.read(ReadOptions(eps, heads, len(sources) if total else 1, centered), query, sources, null)
    return read.value, read.lse


@torch.library.custom_op(
    "residua::attend_gradient",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor gradient, Tensor read, Tensor lse, Tensor query, Tensor[] sources, Tensor? null, float eps, "
    "int heads, bool total, bool centered) -> Tensor[]",
)
def _attend_gradient(
    gradient: Tensor,
    read: Tensor,
    lse: Tensor,
    query: Tensor,
    sources: list[Tensor],
    null: Tensor | None,
    eps: float,
    heads: int,
    total: bool,
    centered: bool,
) -> list[Tensor]:
    """The gradients of the query, of the null (empty without one), and of every source."""
    how = ReadOptions(eps, heads, len(sources) if total else 1, centered)
    one_pass = how.one_pass(gradient.dtype) and not native.large(query, Carry(read, lse))
    was = Carry(read, lse) if one_pass else None
    of_query, of_null, made = native.gradients(how, query, sources, null, gradient, [True] * len(sources), was)
    # both lie in one buffer, and an operator's results must not
    alone = query.new_empty(0) if of_null is None else of_null.clone()
    return [of_query, alone, *(one for one in made if one is not None)]


@_attend.register_fake
def _(
    query: Tensor, sources: list[Tensor], null: Tensor | None, eps: float, heads: int, *options: Any
) -> tuple[Tensor, Tensor]:
    like = sources[0]
    lse = like.new_empty((*like.shape[:-1], heads), dtype=accumulator(like.dtype))
    return torch.empty_like(like, memory_format=torch.contiguous_format), lse


@_attend_gradient.register_fake
def _(
    gradient: Tensor,
    read: Tensor,
    lse: Tensor,
    query: Tensor,
    sources: list[Tensor],
    null: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    made = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in sources]
    return [torch.empty_like(query), query.new_empty(0) if null is None else torch.empty_like(null), *made]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, sources, null, *ctx.options = inputs
    ctx.save_for_backward(query, null, *output, *sources)


def _backward(ctx: Any, gradient: Tensor, of_lse: Tensor) -> tuple[Any, ...]:
    query, null, read, lse, *sources = ctx.saved_tensors
    of_query, of_null, *made = _attend_gradient(gradient, read, lse, query, sources, null, *ctx.options)
    return of_query, made, None if null is None else of_null, None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)
