"""Calls of the depth read in C, on plain tensors and without autograd: `cpu` and `operator` wrap them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from residua.native import guard
from residua.native.guard import Unsupported
from residua.native.library import TYPES, address, check, entry, pointers, threads
from residua.ops.norm import accumulator

MOST_QUERIES = 32
"""ATTEND_QUERIES of attend.h."""

_SHAPE = (c_int, c_int, *(c_int64,) * 5)
_OPTIONS = (c_double, c_double, c_int, c_void_p, c_int, c_void_p)


class ReadOptions(NamedTuple):
    """The options of a read. `scale` multiplies the softmax; `centered` then takes 1 / n away."""

    eps: float
    heads: int = 1
    scale: float = 1
    centered: bool = False

    def one_pass(self, dtype: torch.dtype) -> bool:
        """Whether the backward pass may be given what was read, to go over the sources once and not twice.

        sum_n a_n (dx . v_n) is dx . x then; with x rounded to bfloat16 that would be off by as much as it differs from
        a single dx . v_n where sources are alike.
        """
        return self.heads == 1 and not self.centered and dtype != torch.bfloat16


class Carry(NamedTuple):
    """A read over other sources: one more entry of the softmax."""

    value: Tensor
    """In the accumulation type: what is carried is rounded once, when the read is complete."""
    lse: Tensor
    """The log of the sum of its softmax, [... heads] in the accumulation type."""


def serves(query: Tensor, sources: Sequence[Tensor], null: Tensor | None, heads: int, queries: int = 1) -> None:
    """Raise `Unsupported` for what the kernel cannot read: a wrong address would end the process, not the call.

    query: [d], or [k d] for k queries.
    """
    like = sources[0]
    shape, dtype = like.shape, like.dtype
    guard.require(like)
    for source in sources:
        if source.shape != shape or source.dtype is not dtype or not source.is_cpu:
            raise Unsupported(f"sources unlike the first, which is {dtype} of shape {tuple(shape)} on the CPU")
    width = shape[-1] if shape else 0
    fits = width > 0 and query.shape[-1:] == (width,) and query.numel() == queries * width and width % heads == 0
    if not fits or not query.is_cpu:
        raise Unsupported(f"a query of shape {tuple(query.shape)}, {heads} heads, and sources of {tuple(shape)}")
    if null is not None and null.numel() != 1:
        raise Unsupported(f"a null of shape {tuple(null.shape)}")


def carries(carry: Carry, source: Tensor, heads: int) -> None:
    """Raise `Unsupported` for a carry that is not one of reads of such a source."""
    value, lse, kind = *carry, accumulator(source.dtype)
    fits = value.shape == source.shape and lse.shape == (*source.shape[:-1], heads) and value.is_cpu and lse.is_cpu
    if not fits or value.dtype is not kind or lse.dtype is not kind:
        raise Unsupported(f"a carry of {value.dtype} {tuple(value.shape)} for a source of {tuple(source.shape)}")


def wide(tensor: Tensor, like: Tensor) -> Tensor:
    """A query or null as the kernel takes it, for sources like `like`."""
    return guard.dense(tensor, accumulator(like.dtype))


def null_of(null: Tensor | None, like: Tensor) -> Tensor | None:
    """`wide`, where there is a null."""
    return None if null is None else wide(null, like)


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows as the kernel takes them; copies only of those that lie otherwise."""
    return [one if one.is_contiguous() and not one.is_neg() else guard.dense(one) for one in tensors]


def forward(
    how: ReadOptions,
    queries: Tensor,
    sources: Sequence[Tensor],
    out: Sequence[Tensor] | None = None,
    *,
    null: Tensor | None = None,
    carry: Carry | None = None,
    lse: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Fill `out`, one read a query, and `lse` [k ... heads] and `weights` [n ... heads] where they are given.

    out:     of the accumulation type where there are several queries: such reads are carried.
    queries: [k d] (or [d]) and null: [k], from `wide`; every other tensor from `dense` or new.
    """
    value, logit = (None, null) if carry is None else carry
    run = entry("residua_attend", *_SHAPE, c_void_p, c_void_p, *_OPTIONS, c_void_p, c_void_p, c_void_p)
    check(
        run(
            *_shape(how, queries, sources), pointers(sources), queries.data_ptr(),
            how.eps, how.scale, how.centered, address(logit), carry is not None, address(value),
            None if out is None else pointers(out), address(lse), address(weights),
        )
    )  # fmt: skip


def backward(
    how: ReadOptions,
    queries: Tensor,
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor],
    wanted: Sequence[bool],
    *,
    null: Tensor | None = None,
    carry: Carry | None = None,
    was: Carry | None = None,
    lse: Tensor | None = None,
    before: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor | None], Carry | None]:
    """Gradients of the queries and nulls, like them, of each wanted source, and of the carry.

    gradients: those of the reads; lse: those of the log-sums; before: what is added to each source's gradient, or None.
    carry:     where `was` is given, its value may be anything like it.
    was:       the read and its log-sum, where `how.one_pass`; the carry's value is then not looked at.
    """
    value, logit = (None, null) if carry is None else carry
    made = [torch.empty_like(one) if want else None for one, want in zip(sources, wanted, strict=True)]
    into = None if carry is None else Carry(torch.empty_like(carry.value), torch.empty_like(carry.lse))
    of_queries, of_nulls = torch.empty_like(queries), None if null is None else torch.empty_like(null)
    run = entry("residua_attend_gradient", *_SHAPE, c_void_p, c_void_p, *_OPTIONS, *(c_void_p,) * 10)
    check(
        run(
            *_shape(how, queries, sources), pointers(sources), queries.data_ptr(),
            how.eps, how.scale, how.centered, address(logit), carry is not None, address(value),
            *((None, None) if was is None else (was.value.data_ptr(), was.lse.data_ptr())),
            pointers(gradients), address(lse), None if before is None else pointers(before), pointers(made),
            *((None, None) if into is None else (into.value.data_ptr(), into.lse.data_ptr())),
            of_queries.data_ptr(), address(of_nulls),
        )
    )  # fmt: skip
    return of_queries, of_nulls, made, into


def value(
    how: ReadOptions,
    query: Tensor,
    sources: Sequence[Tensor],
    null: Tensor | None,
    carry: Carry | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """One query's read; fills `lse` where a backward pass will ask for it."""
    like = sources[0]
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    forward(how, wide(query, like), dense(sources), (out,), null=null_of(null, like), carry=carry, lse=lse)
    return out


def read(
    how: ReadOptions, query: Tensor, sources: Sequence[Tensor], null: Tensor | None, carry: Carry | None = None
) -> Carry:
    """One query's read and its log-sum."""
    like = sources[0]
    lse = torch.empty(*like.shape[:-1], how.heads, dtype=accumulator(like.dtype), device="cpu")
    return Carry(value(how, query, sources, null, carry, lse), lse)


def large(query: Tensor, was: Carry) -> bool:
    """Whether the logits of a read are so large that its backward pass must find them all before it uses one."""
    run = entry("residua_attend_is_large", c_int, c_int64, c_int64, c_void_p, c_void_p)
    query = wide(query, was.value)
    answer: int = run(TYPES[was.value.dtype], was.lse.numel(), query.numel(), query.data_ptr(), was.lse.data_ptr())
    return answer != 0


def gradients(
    how: ReadOptions,
    query: Tensor,
    sources: Sequence[Tensor],
    null: Tensor | None,
    gradient: Tensor,
    wanted: Sequence[bool],
    was: Carry | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """The gradients of `read`: query, null, sources."""
    of_query, of_null, made, _ = backward(
        how, wide(query, gradient), dense(sources), dense([gradient]), wanted, null=null_of(null, gradient), was=was
    )
    return of_query.to(query.dtype), None if null is None or of_null is None else of_null.to(null.dtype), made


def _shape(how: ReadOptions, queries: Tensor, sources: Sequence[Tensor]) -> tuple[int, ...]:
    width, numbers, type = queries.shape[-1], sources[0].numel(), TYPES[sources[0].dtype]
    count = queries.numel() // width
    return type, threads(numbers * len(sources) * count), numbers // width, width, how.heads, len(sources), count
