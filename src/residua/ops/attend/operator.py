"""The depth read as operators of torch.library: what a compiler, an exporter or a dispatch mode sees of it.

    residua::attend          one query over its sources, with the log-sum of its softmax
    residua::attend_ahead    several queries over the sources so far, with their log-sums
    residua::attend_merge    one query over such a read and the sources that came since, with its log-sum

Eager code goes through `cpu`, whose dispatch is several times cheaper than that of an operator with a list of tensors.
A graph cannot know how large its logits will be, so that what `cpu` keeps one of for a backward pass, it keeps all of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.native import guard
from residua.ops._context import Context, Gradients, Inputs
from residua.ops.attend import groups, native, reference
from residua.ops.attend.native import Carry, ReadOptions
from residua.ops.norm import accumulator

_HOW = "float eps, int heads, float scale, bool centered"
"""The fields of `ReadOptions`."""


def attend(
    query: Tensor, sources: tuple[Tensor, ...], null: Tensor | None, eps: float, heads: int, total: bool, centered: bool
) -> Tensor:
    """`reference.attend`."""
    return _attend(query, list(sources), null, eps, heads, len(sources) if total else 1, centered)[0]


def ahead(
    queries: Tensor, sources: tuple[Tensor, ...], nulls: Tensor | None, eps: float, heads: int
) -> tuple[Carry, ...]:
    """`cpu.ahead`."""
    reads, sums = _ahead(queries, list(sources), nulls, eps, heads)
    return tuple(map(Carry, reads, sums))


def merge(carry: Carry, query: Tensor, sources: tuple[Tensor, ...], eps: float, heads: int, scale: float) -> Tensor:
    """`cpu.merge`."""
    return _merge(query, carry.value, carry.lse, list(sources), eps, heads, scale)[0]


def _sums(like: Tensor, heads: int) -> Tensor:
    """Room for a log-sum."""
    return like.new_empty((*like.shape[:-1], heads), dtype=accumulator(like.dtype))


def _carried(like: Tensor) -> Tensor:
    """Room for a read that is carried."""
    return like.new_empty(like.shape, dtype=accumulator(like.dtype))


def _one_pass(how: ReadOptions, query: Tensor, was: Carry) -> Carry | None:
    """What was read, where a backward pass may be given it."""
    return was if how.one_pass(was.value.dtype) and not native.large(query, was) else None


# schemas are written out: under jaxtyping's import hook annotations cannot be read back
@torch.library.custom_op(
    "residua::attend",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor query, Tensor[] sources, Tensor? null, {_HOW}) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, sources: list[Tensor], null: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    options = ReadOptions(*how)
    native.serves(query, sources, null, options.heads)
    read = native.read(options, query, sources, null)
    return read.value, read.lse


@torch.library.custom_op(
    "residua::attend_gradient",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor gradient, Tensor read, Tensor lse, Tensor query, Tensor[] sources, Tensor? null, "
    f"{_HOW}) -> Tensor[]",
)
def _attend_gradient(
    gradient: Tensor, read: Tensor, lse: Tensor, query: Tensor, sources: list[Tensor], null: Tensor | None, *how: Any
) -> list[Tensor]:
    """The gradients of the query, of the null (empty without one), and of every source."""
    options = ReadOptions(*how)
    was = _one_pass(options, query, Carry(read, lse))
    of_query, of_null, made = native.gradients(options, query, sources, null, gradient, [True] * len(sources), was)
    of_null = query.new_empty(0) if of_null is None else of_null
    return [of_query, of_null, *(one for one in made if one is not None)]


@_attend.register_fake
def _(query: Tensor, sources: list[Tensor], null: Tensor | None, eps: float, heads: int, *rest: Any) -> Any:
    return sources[0].new_empty(sources[0].shape), _sums(sources[0], heads)


@_attend_gradient.register_fake
def _(
    gradient: Tensor, read: Tensor, lse: Tensor, query: Tensor, sources: list[Tensor], null: Tensor | None, *how: Any
) -> list[Tensor]:
    of_null = query.new_empty(0) if null is None else null.new_empty(null.shape)
    return [query.new_empty(query.shape), of_null, *(one.new_empty(one.shape) for one in sources)]


def _keep(ctx: Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, sources, null, *ctx.how = inputs
    ctx.save_for_backward(query, null, *output, *sources)


def _backward(ctx: Context, gradient: Tensor, of_lse: Tensor) -> Gradients:
    query, null, read, lse, *sources = ctx.saved_tensors
    how, (of_query, of_sources, of_null, *_) = ReadOptions(*ctx.how), ctx.needs_input_grad
    if torch.is_grad_enabled():  # create_graph: second derivatives are the reference's

        def again(query: Tensor, null: Tensor | None, *sources: Tensor) -> Tensor:
            return reference.attend(
                query, sources, eps=how.eps, null=null, heads=how.heads, total=how.scale != 1, centered=how.centered
            )

        wanted = (of_query, of_null, *of_sources)
        found, turned, *made = guard.differentiate(again, (query, null, *sources), wanted, gradient)
        return found, made, turned, *(None for _ in how)
    found, turned, *made = _attend_gradient(gradient, read, lse, query, sources, null, *how)
    return found, made, None if null is None else turned, *(None for _ in how)


_attend.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op(
    "residua::attend_ahead",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor queries, Tensor[] sources, Tensor? nulls, float eps, int heads) -> (Tensor[], Tensor[])",
)
def _ahead(
    queries: Tensor, sources: list[Tensor], nulls: Tensor | None, eps: float, heads: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The reads and their log-sums."""
    like = sources[0]
    native.serves(queries, sources, None, heads, len(queries))
    reads = [_carried(like) for _ in range(len(queries))]
    sums = _sums(like, heads).new_empty((len(queries), *like.shape[:-1], heads))
    native.forward(
        ReadOptions(eps, heads), native.wide(queries, like), native.dense(sources), reads,
        null=native.null_of(nulls, like), lse=sums,
    )  # fmt: skip
    return reads, [one.clone() for one in sums]


@torch.library.custom_op(
    "residua::attend_ahead_gradient",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor[] of_reads, Tensor[] of_sums, Tensor queries, Tensor[] sources, Tensor? nulls, float eps, "
    "int heads) -> Tensor[]",
)
def _ahead_gradient(
    of_reads: list[Tensor],
    of_sums: list[Tensor],
    queries: Tensor,
    sources: list[Tensor],
    nulls: Tensor | None,
    eps: float,
    heads: int,
) -> list[Tensor]:
    """The gradients of the queries, of the nulls (empty without), and of every source."""
    like = sources[0]
    of_queries, of_nulls, made, _ = native.backward(
        ReadOptions(eps, heads), native.wide(queries, like), native.dense(sources), native.dense(of_reads),
        [True] * len(sources), null=native.null_of(nulls, like), lse=torch.stack(of_sums),
    )  # fmt: skip
    of_nulls = queries.new_empty(0) if nulls is None or of_nulls is None else of_nulls.to(nulls.dtype)
    return [of_queries.to(queries.dtype), of_nulls, *(one for one in made if one is not None)]


@_ahead.register_fake
def _(queries: Tensor, sources: list[Tensor], nulls: Tensor | None, eps: float, heads: int) -> Any:
    count = range(len(queries))
    return [_carried(sources[0]) for _ in count], [_sums(sources[0], heads) for _ in count]


@_ahead_gradient.register_fake
def _(
    of_reads: list[Tensor],
    of_sums: list[Tensor],
    queries: Tensor,
    sources: list[Tensor],
    nulls: Tensor | None,
    eps: float,
    heads: int,
) -> list[Tensor]:
    of_nulls = queries.new_empty(0) if nulls is None else nulls.new_empty(nulls.shape)
    return [queries.new_empty(queries.shape), of_nulls, *(one.new_empty(one.shape) for one in sources)]


def _keep_ahead(ctx: Context, inputs: Inputs, output: Any) -> None:
    queries, sources, nulls, *ctx.how = inputs
    ctx.save_for_backward(queries, nulls, *sources)


def _ahead_backward(ctx: Context, of_reads: list[Tensor], of_sums: list[Tensor]) -> Gradients:
    queries, nulls, *sources = ctx.saved_tensors
    of_queries, of_sources, of_nulls, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        slopes = (*of_reads, torch.stack(of_sums), *(None for _ in sources))
        wanted = (of_queries, of_nulls, *of_sources)
        how = ReadOptions(*ctx.how)
        found, turned, *made = groups.ahead_gradients(how, queries, nulls, sources, slopes, wanted)
        return found, made, turned, None, None
    found, turned, *made = _ahead_gradient(of_reads, of_sums, queries, sources, nulls, *ctx.how)
    return found, made, None if nulls is None else turned, None, None


_ahead.register_autograd(_ahead_backward, setup_context=_keep_ahead)


@torch.library.custom_op(
    "residua::attend_merge",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor value, Tensor lse, Tensor[] sources, float eps, int heads, float scale) "
    "-> (Tensor, Tensor)",
)
def _merge(
    query: Tensor, value: Tensor, lse: Tensor, sources: list[Tensor], eps: float, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    native.serves(query, sources, None, heads)
    carry = Carry(*native.dense([value, lse]))
    native.carries(carry, sources[0], heads)
    read = native.read(ReadOptions(eps, heads, scale), query, sources, None, carry)
    return read.value, read.lse


@torch.library.custom_op(
    "residua::attend_merge_gradient",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor gradient, Tensor read, Tensor read_lse, Tensor query, Tensor value, Tensor lse, Tensor[] sources, "
    "float eps, int heads, float scale) -> Tensor[]",
)
def _merge_gradient(
    gradient: Tensor,
    read: Tensor,
    read_lse: Tensor,
    query: Tensor,
    value: Tensor,
    lse: Tensor,
    sources: list[Tensor],
    eps: float,
    heads: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of the query, of the carried value and log-sum, and of every source."""
    how = ReadOptions(eps, heads, scale)
    of_query, _, made, of_carry = native.backward(
        how, native.wide(query, gradient), native.dense(sources), native.dense([gradient]), [True] * len(sources),
        carry=Carry(*native.dense([value, lse])), was=_one_pass(how, query, Carry(read, read_lse)),
    )  # fmt: skip
    assert of_carry is not None
    return [of_query.to(query.dtype), *of_carry, *(one for one in made if one is not None)]


@_merge.register_fake
def _(query: Tensor, value: Tensor, lse: Tensor, sources: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    return sources[0].new_empty(sources[0].shape), lse.new_empty(lse.shape)


@_merge_gradient.register_fake
def _(
    gradient: Tensor,
    read: Tensor,
    read_lse: Tensor,
    query: Tensor,
    value: Tensor,
    lse: Tensor,
    sources: list[Tensor],
    *how: Any,
) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (query, value, lse, *sources)]


def _keep_merge(ctx: Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, value, lse, sources, *ctx.how = inputs
    ctx.save_for_backward(*output, query, value, lse, *sources)


def _merge_backward(ctx: Context, gradient: Tensor, of_lse: Tensor) -> Gradients:
    read, read_lse, query, value, lse, *sources = ctx.saved_tensors
    of_query, of_value, of_sum, of_sources, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        wanted = (of_query, of_value, of_sum, *of_sources)
        how = ReadOptions(*ctx.how)
        (
            found,
            *carried,
        ) = groups.merge_gradients(how, query, value, lse, read, sources, gradient, wanted)
    else:
        found, *carried = _merge_gradient(gradient, read, read_lse, query, value, lse, sources, *ctx.how)
    return found, *carried[:2], carried[2:], None, None, None


_merge.register_autograd(_merge_backward, setup_context=_keep_merge)
