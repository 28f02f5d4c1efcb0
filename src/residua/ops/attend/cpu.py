"""The depth read by kernels in C: sources where they are, nothing of size n t d saved, one gradient a source.

    attend   one query over its sources                          x
    ahead    several queries that share one pass over sources    (x_k, lse_k), for reads that will have more sources
    merge    one query over the sources that came since          x, from (x_k, lse_k) and those

The forward keeps references to its inputs and to x (which a norm keeps anyway) and one number a token; the backward
pass finds the logits again on its way through the sources. Gradients are returned and added up by autograd: nothing is
remembered between calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.native import guard
from residua.native.guard import Unsupported
from residua.ops._backend import kernel
from residua.ops.attend import groups, native, operator, reference
from residua.ops.attend.native import Carry, ReadOptions
from residua.ops.norm import accumulator

CARRIED = (torch.float32, torch.float64, torch.bfloat16)
"""Types of sources whose reads can be carried, which they are in the accumulation type."""


@kernel("attend", "cpu", "cpu")
def attend(
    query: Tensor,
    sources: tuple[Tensor, ...],
    *,
    eps: float,
    null: Tensor | None,
    heads: int,
    total: bool,
    centered: bool,
    onto: Tensor | None = None,
) -> Tensor:
    """`reference.attend`."""
    if guard.only_torch(query, *sources):
        options = {"eps": eps, "null": null, "heads": heads, "total": total, "centered": centered}
        return reference.attend(query, sources, onto=onto, **options)
    native.serves(query, sources, null, heads)
    if guard.watched():
        return reference.added(onto, operator.attend(query, sources, null, eps, heads, total, centered))
    how = ReadOptions(eps, heads, len(sources) if total else 1, centered)
    if not torch.is_grad_enabled():
        return reference.added(onto, native.value(how, query, sources, null))
    if onto is None or onto.dtype is not sources[0].dtype or onto.shape != sources[0].shape or guard.foreign(onto):
        return reference.added(onto, _Attend.apply(how, None, query, null, *sources))
    return _Attend.apply(how, onto, query, null, *sources)


@kernel("attend_weights", "cpu", "cpu")
def attend_weights(
    query: Tensor,
    sources: tuple[Tensor, ...],
    *,
    eps: float,
    null: Tensor | None,
    heads: int,
    total: bool,
    centered: bool,
) -> Tensor:
    """`reference.weights`; where a gradient of the weights is wanted, by the reference itself."""
    if guard.traced(query, *sources) or (
        torch.is_grad_enabled()
        and any(one.requires_grad for one in (query, *sources, *(() if null is None else (null,))))
    ):
        return reference.weights(query, sources, eps=eps, null=null, heads=heads, total=total, centered=centered)
    native.serves(query, sources, null, heads)
    how, like = ReadOptions(eps, heads, len(sources) if total else 1, centered), sources[0]
    found = torch.empty(len(sources), *like.shape[:-1], heads, dtype=accumulator(like.dtype), device="cpu")
    native.forward(how, native.wide(query, like), native.dense(sources), null=native.null_of(null, like), weights=found)
    return found


def ahead(
    queries: Tensor, sources: tuple[Tensor, ...], nulls: Tensor | None = None, *, eps: float, heads: int = 1
) -> tuple[tuple[Carry, ...], tuple[Tensor, ...]]:
    """What each of the queries [k d], with its null [k], reads from the sources so far, for `merge`; and the sources.

    Those are to be used from here on: gradients of reads that use them arrive here, and leave with this pass's added
    (in a compiled graph they are the same as before: a compiler adds gradients up where it likes).
    """
    native.serves(queries, sources, None, heads, len(queries))
    if not 2 <= len(queries) <= native.MOST_QUERIES:
        raise Unsupported(f"{len(queries)} queries at once; 2 to {native.MOST_QUERIES} can share a pass")
    if guard.watched():
        return operator.ahead(queries, sources, nulls, eps, heads), sources
    found = _Ahead.apply(ReadOptions(eps, heads), queries, nulls, *sources)
    reads, sums, same = found[: len(queries)], found[len(queries)], found[len(queries) + 1 :]
    return tuple(map(Carry, reads, sums.unbind())), same


def merge(
    carry: Carry, query: Tensor, sources: tuple[Tensor, ...], *, eps: float, heads: int = 1, scale: float = 1
) -> Tensor:
    """`scale` times the read over the carry's sources and these together; of none, in the type of the carry."""
    if not sources:
        return carry.value if scale == 1 else carry.value * scale
    native.serves(query, sources, None, heads)
    native.carries(carry, sources[0], heads)
    if guard.watched():
        return operator.merge(carry, query, sources, eps, heads, scale)
    return _Merge.apply(ReadOptions(eps, heads, scale), query, carry.value, carry.lse, *sources)


class _Attend(torch.autograd.Function):
    """A read is kept, as a norm does anyway, for a backward pass that goes over the sources once. Nobody keeps one that
    is added to something: then nothing is, and the pass goes over a tile of the sources twice."""

    @staticmethod
    def forward(
        ctx: Any, how: ReadOptions, onto: Tensor | None, query: Tensor, null: Tensor | None, *sources: Tensor
    ) -> Tensor:
        ctx.how = how
        if onto is not None or not how.one_pass(sources[0].dtype):
            ctx.save_for_backward(query, null, None, None, *sources)
            read = native.value(how, query, sources, null)
            return read if onto is None else read.add_(onto)
        was = native.read(how, query, sources, null)
        kept = (None, None) if native.large(query, was) else was
        ctx.save_for_backward(query, null, *kept, *sources)
        return was.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, null, value, lse, *sources = ctx.saved_tensors
        how, (_, of_onto, *wanted) = ctx.how, ctx.needs_input_grad
        passed = gradient if of_onto else None
        if torch.is_grad_enabled() or guard.batched(gradient):  # second derivatives are the reference's

            def again(query: Tensor, null: Tensor | None, *sources: Tensor) -> Tensor:
                return reference.attend(
                    query, sources, eps=how.eps, null=null, heads=how.heads, total=how.scale != 1, centered=how.centered
                )

            return None, passed, *guard.differentiate(again, (query, null, *sources), wanted, gradient)
        was = None if value is None else Carry(value, lse)
        of_query, of_null, made = native.gradients(how, query, sources, null, gradient, wanted[2:], was)
        return None, passed, of_query if wanted[0] else None, of_null if wanted[1] else None, *made


class _Ahead(torch.autograd.Function):
    """The reads, their log-sums [k ... heads], and the sources again."""

    @staticmethod
    def forward(
        ctx: Any, how: ReadOptions, queries: Tensor, nulls: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        like = sources[0]
        wide = accumulator(like.dtype)
        reads = tuple(torch.empty(like.shape, dtype=wide, device="cpu") for _ in queries)
        sums = torch.empty(len(queries), *like.shape[:-1], how.heads, dtype=wide, device="cpu")
        native.forward(
            how, native.wide(queries, like), native.dense(sources), reads, null=native.null_of(nulls, like), lse=sums
        )
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, nulls, *sources)
        return (*reads, sums, *sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        queries, nulls, *sources = ctx.saved_tensors
        how, count, wanted, like = ctx.how, len(queries), ctx.needs_input_grad, sources[0]
        if torch.is_grad_enabled() or guard.batched(*gradients):
            return None, *groups.ahead_gradients(how, queries, nulls, sources, gradients, wanted[1:])
        zeros = partial(torch.zeros, like.shape, dtype=accumulator(like.dtype), device="cpu")
        reads = [zeros() if one is None else one for one in gradients[:count]]
        sums, later = gradients[count], gradients[count + 1 :]
        of_queries, of_nulls, made, _ = native.backward(
            how,
            native.wide(queries, like),
            native.dense(sources),
            native.dense(reads),
            wanted[3:],
            null=native.null_of(nulls, like),
            lse=None if sums is None else guard.dense(sums),
            before=[None if one is None else guard.dense(one) for one in later],
        )
        return (
            None,
            of_queries.to(queries.dtype) if wanted[1] else None,
            of_nulls.to(nulls.dtype) if of_nulls is not None and wanted[2] else None,
            *made,
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: ReadOptions, query: Tensor, value: Tensor, lse: Tensor, *sources: Tensor) -> Tensor:
        was = native.read(how, query, sources, None, Carry(*native.dense([value, lse])))
        ctx.how = how
        # in one pass the carried value is found as what the sources do not explain of the read, and need not be kept
        kept = (None, *was) if how.one_pass(sources[0].dtype) and not native.large(query, was) else (value, None, None)
        ctx.save_for_backward(query, lse, *kept, *sources)
        return was.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, lse, value, read, read_lse, *sources = ctx.saved_tensors
        how, wanted = ctx.how, ctx.needs_input_grad
        if torch.is_grad_enabled() or guard.batched(gradient):
            return None, *groups.merge_gradients(how, query, value, lse, read, sources, gradient, wanted[1:])
        of_query, _, made, of_carry = native.backward(
            how,
            native.wide(query, gradient),
            native.dense(sources),
            native.dense([gradient]),
            wanted[4:],
            carry=Carry(*native.dense([read if value is None else value, lse])),
            was=None if read is None else Carry(read, read_lse),
        )
        assert of_carry is not None
        return None, of_query.to(query.dtype) if wanted[1] else None, *of_carry, *made
