"""Depth reads in groups on a GPU: `ahead`, `merge` and `together` of `residua.ops.attend`, in Triton.

What a group carries is of the type to add up in, so that bfloat16 reads are rounded once, when they are merged. The
kernels are in `triton_groups_device`. No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from residua.native.guard import Unsupported
from residua.ops import _triton as host
from residua.ops import norm
from residua.ops._context import Context, Gradients
from residua.ops._triton_device import accumulator
from residua.ops._triton_table import addresses
from residua.ops.attend import groups
from residua.ops.attend import triton_groups_device as device
from residua.ops.attend.native import Carry, ReadOptions

BLOCK = 1 << 14
"""Bytes of all queries that a program holds, three times backwards: as many as registers take without a spill."""


def most_queries(width: int, heads: int, dtype: torch.dtype) -> int:
    """Queries that share a pass over rows of `width`; two may take twice the room."""
    row = host.power(heads) * host.power(width // heads) * norm.accumulator(dtype).itemsize
    return min(16, max(BLOCK // row, 2 if row <= BLOCK else 1))


def _settings(how: ReadOptions, queries: Tensor, like: Tensor, nulls: Tensor | None) -> host.Settings:
    width = like.shape[-1]
    block_queries, block_heads = host.power(len(queries)), host.power(how.heads)
    block_width = host.power(width // how.heads)
    block = block_queries * block_heads * block_width
    block_tokens = host.tokens_a_block(block)
    return {
        "QUERIES": len(queries), "WIDTH": width, "HEADS": how.heads, "EPS": how.eps, "NULL": nulls is not None,
        "ACC": accumulator(like.dtype), "BT": block_tokens, "BK": block_queries, "BH": block_heads, "BE": block_width,
        "warps": host.warps(block_tokens * block),
    }  # fmt: skip


def _grid(like: Tensor, settings: host.Settings) -> int:
    return min(host.programs(like), triton.cdiv(like.numel() // like.shape[-1], settings["BT"]))


@torch.library.custom_op("residua_triton::attend_group", mutates_args=())
def _group(
    queries: Tensor, sources: list[Tensor], nulls: Tensor | None, value: Tensor | None, value_lse: Tensor | None,
    dtype: torch.dtype, eps: float, heads: int, scale: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The reads [k ...], the softmax's greatest logit and 1 / mass [k ... heads 2], and its log-sum [k ... heads]."""
    sources = [one.contiguous() for one in sources]
    like, width, count = sources[0], sources[0].shape[-1], len(queries)
    wide = norm.accumulator(like.dtype)
    settings = _settings(ReadOptions(eps, heads), queries, like, nulls)
    settings["warps"] = min(16, 2 * settings["warps"])
    reads = like.new_empty((count, *like.shape), dtype=dtype)
    sums = like.new_empty((count, *like.shape[:-1], heads, 2), dtype=wide)
    lse = like.new_empty((count, *like.shape[:-1], heads), dtype=wide)
    host.launch(
        device.forward_kernel, (_grid(like, settings),), like,
        addresses(sources, like), like, queries.contiguous(), _dense(nulls), _dense(value), _dense(value_lse),
        reads, sums, lse, len(sources), scale, like.numel() // width,
        CARRY=value is not None, ALIGNED=host.aligned(sources, width), **settings,
    )  # fmt: skip
    return reads, sums, lse


@_group.register_fake
def _(queries, sources, nulls, value, value_lse, dtype, eps, heads, scale):
    like, count = sources[0], len(queries)
    wide = norm.accumulator(like.dtype)
    return (
        like.new_empty((count, *like.shape), dtype=dtype),
        like.new_empty((count, *like.shape[:-1], heads, 2), dtype=wide),
        like.new_empty((count, *like.shape[:-1], heads), dtype=wide),
    )


@torch.library.custom_op("residua_triton::attend_group_backward", mutates_args=())
def _group_backward(
    dreads: Tensor, dlse: Tensor | None, sums: Tensor, queries: Tensor, sources: list[Tensor], nulls: Tensor | None,
    value: Tensor | None, value_lse: Tensor | None, before: list[Tensor | None], wanted: list[bool],
    eps: float, heads: int, scale: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the queries, of the nulls and the carry where there are some, and of the wanted sources, to which
    those of `before` are added."""
    sources, before = [one.contiguous() for one in sources], [_dense(one) for one in before]
    like, width, count = sources[0], sources[0].shape[-1], len(queries)
    settings = _settings(ReadOptions(eps, heads), queries, like, nulls)
    grid = _grid(like, settings)
    made = [torch.empty_like(one) if want else None for one, want in zip(sources, wanted, strict=True)]
    dqueries = like.new_empty((grid, count, width), dtype=sums.dtype)
    dnulls = like.new_empty((grid, count), dtype=sums.dtype)
    carried = [] if value is None or value_lse is None else [_empty(value), _empty(value_lse)]
    dvalue, dvalue_lse = carried or (like, like)
    later = any(one is not None for one in before)
    host.launch(
        device.backward_kernel, (grid,), like,
        addresses(sources, like), addresses(made, like), addresses(before, like) if later else like, like,
        queries.contiguous(), _dense(nulls), _dense(value), _dense(value_lse), sums,
        dreads.contiguous(), _dense(dlse), dqueries, dnulls, dvalue, dvalue_lse,
        len(sources), scale, like.numel() // width,
        CARRY=value is not None, SUMS=dlse is not None, BEFORE=later,
        ALIGNED=host.aligned([*sources, *made, *before], width), **settings,
    )  # fmt: skip
    shares = [dqueries.sum(0).to(queries.dtype)] + ([] if nulls is None else [dnulls.sum(0).to(nulls.dtype)])
    return [*shares, *carried, *(one for one in made if one is not None)]


@_group_backward.register_fake
def _(dreads, dlse, sums, queries, sources, nulls, value, value_lse, before, wanted, eps, heads, scale):
    shares = [_empty(one) for one in (queries, nulls, value, value_lse) if one is not None]
    return [*shares, *(_empty(one) for one, want in zip(sources, wanted, strict=True) if want)]


def _dense(one: Tensor | None) -> Tensor | None:
    return None if one is None else one.contiguous()


def _empty(one: Tensor) -> Tensor:
    return torch.empty_like(one, memory_format=torch.contiguous_format)


class _Ahead(torch.autograd.Function):
    """The reads [k ...], their log-sums [k ... heads], and the sources again."""

    @staticmethod
    def forward(
        ctx: Context, how: ReadOptions, queries: Tensor, nulls: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        wide = norm.accumulator(sources[0].dtype)
        reads, sums, lse = _group(queries, list(sources), nulls, None, None, wide, how.eps, how.heads, 1)
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, nulls, sums, *sources)
        return (reads, lse, *sources)

    @staticmethod
    def backward(ctx: Context, dreads: Tensor | None, dlse: Tensor | None, *later: Tensor | None) -> Gradients:
        queries, nulls, sums, *sources = ctx.saved_tensors
        how, wanted, like = ctx.how, ctx.needs_input_grad, sources[0]
        if dreads is None:
            dreads = like.new_zeros((len(queries), *like.shape), dtype=sums.dtype)
        if torch.is_grad_enabled():  # create_graph: second derivatives are the reference's
            gradients = [*dreads.unbind(), dlse, *later]
            return None, *groups.ahead_gradients(how, queries, nulls, sources, gradients, wanted[1:])
        found = iter(
            _group_backward(
                dreads, dlse, sums, queries, sources, nulls, None, None, list(later), list(wanted[3:]),
                how.eps, how.heads, 1,
            )
        )  # fmt: skip
        of_queries, of_nulls = next(found), None if nulls is None else next(found)
        return None, of_queries, of_nulls, *(next(found) if want else None for want in wanted[3:])


class _Merge(torch.autograd.Function):
    """The read over a carry's sources and these."""

    @staticmethod
    def forward(ctx: Context, how: ReadOptions, query: Tensor, value: Tensor, lse: Tensor, *sources: Tensor) -> Tensor:
        read, sums, _ = _group(
            query[None], list(sources), None, value[None], lse[None], sources[0].dtype,
            how.eps, how.heads, int(how.scale),
        )  # fmt: skip
        ctx.how = how
        ctx.save_for_backward(query, value, lse, sums, *sources)
        return read[0]

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Gradients:
        query, value, lse, sums, *sources = ctx.saved_tensors
        how, wanted = ctx.how, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return None, *groups.merge_gradients(how, query, value, lse, None, sources, gradient, wanted[1:])
        of_query, of_value, of_lse, *made = _group_backward(
            gradient[None], None, sums, query[None], sources, None, value[None], lse[None], [None] * len(sources),
            list(wanted[4:]), how.eps, how.heads, int(how.scale),
        )  # fmt: skip
        found = iter(made)
        return None, of_query[0], of_value[0], of_lse[0], *(next(found) if want else None for want in wanted[4:])


def _served(query: Tensor, sources: Sequence[Tensor], heads: int) -> None:
    """Raise `Unsupported` for what the kernels do not take."""
    host.checked(query, *sources)
    like = sources[0]
    if like.shape[-1] % heads:
        raise Unsupported(f"a width of {like.shape[-1]} in {heads} heads")
    if any(one.shape != like.shape or one.dtype != like.dtype for one in sources):
        raise Unsupported(f"sources unlike the first, which is {like.dtype} of shape {tuple(like.shape)}")


def _at_once(count: int, like: Tensor, heads: int) -> int:
    width = like.shape[-1]
    most = most_queries(width, heads, like.dtype)
    if count < 2 or most < 2:
        raise Unsupported(f"{count} queries of {width}, of which {max(most, 1)} can share a pass")
    return most


def ahead(
    queries: Tensor, sources: tuple[Tensor, ...], nulls: Tensor | None = None, *, eps: float, heads: int = 1
) -> tuple[tuple[Carry, ...], tuple[Tensor, ...]]:
    """What each of the queries [k d] reads from the sources so far, for `merge`; and the sources to go on with."""
    _served(queries, sources, heads)
    most, how = _at_once(len(queries), sources[0], heads), ReadOptions(eps, heads)
    carries: list[Carry] = []
    for first in range(0, len(queries), most):
        part = slice(first, first + most)
        reads, lse, *same = _Ahead.apply(how, queries[part], None if nulls is None else nulls[part], *sources)
        carries += map(Carry, reads.unbind(), lse.unbind())
        sources = tuple(same)
    return tuple(carries), sources


def merge(
    carry: Carry, query: Tensor, sources: tuple[Tensor, ...], *, eps: float, heads: int = 1, scale: float = 1
) -> Tensor:
    """`scale` times the read over the carry's sources and these together; without any, in the type of the carry."""
    if not sources:
        return carry.value if scale == 1 else carry.value * scale
    _served(query, sources, heads)
    if scale != int(scale):
        raise Unsupported(f"a scale of {scale}, not a whole number")
    return _Merge.apply(ReadOptions(eps, heads, scale), query, carry.value, carry.lse, *sources)


def together(
    queries: Sequence[Tensor], gains: Sequence[Tensor], sources: Sequence[Tensor], *,
    nulls: Sequence[Tensor] = (), gates: Sequence[Tensor] = (), eps: float, heads: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One complete read a query, times its gain, and times its gate where there is one; without gradients."""
    _served(queries[0], sources, heads)
    like, most = sources[0], _at_once(len(queries), sources[0], heads)
    wide = norm.accumulator(like.dtype)
    found: list[Tensor] = []
    for first in range(0, len(queries), most):
        part = slice(first, first + most)
        stacked = torch.stack(list(queries[part])) * torch.stack(list(gains[part]))
        null = torch.cat(list(nulls[part])) if nulls else None
        dtype = wide if gates else like.dtype
        reads = _group(stacked, list(sources), null, None, None, dtype, eps, heads, 1)[0]
        if gates:
            gate = torch.stack(list(gates[part])).to(wide)
            reads = (reads * gate.view(-1, *(1,) * like.ndim)).to(like.dtype)
        found += reads.unbind()
    return tuple(found)
