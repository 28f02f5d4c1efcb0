"""Several queries over the same sources in one pass, and one query over the sources that came since: Triton kernels.

A block is [tokens, queries, heads, width / heads]; a source is loaded once for all queries. A carry, (x_0, lse_0) of an
earlier pass, is one more entry of the softmax, with the value x_0 and the logit lse_0. With p the softmax,
g_n = <dx, v_n>, s the scale of the read and dlse the gradient of its log-sum,

    delta = sum_n p_n g_n       dl_n = p_n (s (g_n - delta) + dlse)
    dv_n  = sum_queries (s p_n dx + rstd_n dl_n q) - rstd_n^3 / d (sum_queries,heads dl_n <q, v_n>) v_n
    dx_0  = s p_0 dx            dlse_0 = dl_0
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._triton_device import source


@triton.jit
def _places(
    block, tokens, QUERIES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Offsets and masks of a block: [BT, 1, BH, BE] of a source, [BT, BK, BH, BE] of reads, [BT, BK, BH] of scalars."""
    t = block * BT + tl.arange(0, BT).to(tl.int64)
    k, h, e = tl.arange(0, BK).to(tl.int64), tl.arange(0, BH), tl.arange(0, BE)
    inner = (h[:, None] * (WIDTH // HEADS) + e[None, :])[None, None, :, :]
    exists = ((h[:, None] < HEADS) & (e[None, :] < WIDTH // HEADS))[None, None, :, :]
    at = t[:, None, None, None] * WIDTH + inner
    live = (t < tokens)[:, None, None, None] & exists
    read_at = k[None, :, None, None] * (tokens * WIDTH) + at
    read_live = (k < QUERIES)[None, :, None, None] & live
    scalar_at = (k[None, :, None] * tokens + t[:, None, None]) * HEADS + h[None, None, :]
    scalar_live = (t < tokens)[:, None, None] & (k < QUERIES)[None, :, None] & (h < HEADS)[None, None, :]
    return at, live, read_at, read_live, scalar_at, scalar_live


@triton.jit
def _queries(
    queries, QUERIES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr,
    BK: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The queries [1, BK, BH, BE], where they are, and which there are."""
    k, h, e = tl.arange(0, BK), tl.arange(0, BH), tl.arange(0, BE)
    at = k[:, None, None] * WIDTH + h[None, :, None] * (WIDTH // HEADS) + e[None, None, :]
    live = (k < QUERIES)[:, None, None] & (h < HEADS)[None, :, None] & (e < WIDTH // HEADS)[None, None, :]
    return tl.load(queries + at, mask=live, other=0.0).to(ACC)[None, :, :, :], at, live


@triton.jit
def _dots(v, q, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / rms(v) of each token, [BT, 1, 1], and q . v, [BT, BK, BH]."""
    rstd = tl.rsqrt(tl.sum(tl.sum(v * v, 3), 2) / WIDTH + EPS)
    return rstd[:, :, None], tl.sum(q * v, 3)


@triton.jit
def forward_kernel(
    table, like, queries, nulls, value, value_lse, reads, sums, lse, count, scale, tokens,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, NULL: tl.constexpr,
    CARRY: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    q, _, _ = _queries(queries, QUERIES, WIDTH, HEADS, ACC, BK, BH, BE)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BT), tl.num_programs(0)):
        at, live, read_at, read_live, scalar_at, scalar_live = _places(
            block, tokens, QUERIES, WIDTH, HEADS, BT, BK, BH, BE
        )
        top = tl.full([BT, BK, BH], float("-inf"), ACC)
        mass = tl.zeros([BT, BK, BH], ACC)
        mixed = tl.zeros([BT, BK, BH, BE], ACC)
        if NULL:
            k = tl.arange(0, BK)
            null = tl.load(nulls + k, mask=k < QUERIES, other=0.0).to(ACC)
            top = tl.zeros([BT, BK, BH], ACC) + null[None, :, None]
            mass += 1.0
        if CARRY:
            top = tl.load(value_lse + scalar_at, mask=scalar_live, other=0.0).to(ACC)
            mass += 1.0
            mixed = tl.load(value + read_at, mask=read_live, other=0.0).to(ACC)
        for n in range(count):
            v = tl.load(source(table, n, like, ALIGNED) + at, mask=live, other=0.0).to(ACC)
            rstd, dot = _dots(v, q, WIDTH, EPS)
            logit = dot * rstd
            peak = tl.maximum(top, logit)
            decay, weight = tl.exp(top - peak), tl.exp(logit - peak)
            mass = mass * decay + weight
            mixed = mixed * decay[:, :, :, None] + weight[:, :, :, None] * v
            top = peak
        mixed = mixed * (scale / mass)[:, :, :, None]
        tl.store(reads + read_at, mixed.to(reads.dtype.element_ty), mask=read_live)
        tl.store(sums + 2 * scalar_at, top, mask=scalar_live)
        tl.store(sums + 2 * scalar_at + 1, 1 / mass, mask=scalar_live)
        tl.store(lse + scalar_at, top + tl.log(mass), mask=scalar_live)


@triton.jit
def backward_kernel(
    table, gradients, before, like, queries, nulls, value, value_lse, sums, dreads, dlse,
    dqueries, dnulls, dvalue, dvalue_lse, count, scale, tokens,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, NULL: tl.constexpr,
    CARRY: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr, SUMS: tl.constexpr, BEFORE: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    q, q_at, q_live = _queries(queries, QUERIES, WIDTH, HEADS, ACC, BK, BH, BE)
    sum_queries = tl.zeros([BK, BH, BE], ACC)
    sum_nulls = tl.zeros([BK], ACC)
    k = tl.arange(0, BK)
    for block in range(program, tl.cdiv(tokens, BT), tl.num_programs(0)):
        at, live, read_at, read_live, scalar_at, scalar_live = _places(
            block, tokens, QUERIES, WIDTH, HEADS, BT, BK, BH, BE
        )
        dx = tl.load(dreads + read_at, mask=read_live, other=0.0).to(ACC) * scale
        top = tl.load(sums + 2 * scalar_at, mask=scalar_live, other=0.0)
        share = tl.load(sums + 2 * scalar_at + 1, mask=scalar_live, other=0.0)
        of_sum = tl.zeros([BT, BK, BH], ACC)
        if SUMS:
            of_sum = tl.load(dlse + scalar_at, mask=scalar_live, other=0.0).to(ACC)
        delta = tl.zeros([BT, BK, BH], ACC)
        for n in range(count):
            v = tl.load(source(table, n, like, ALIGNED) + at, mask=live, other=0.0).to(ACC)
            rstd, dot = _dots(v, q, WIDTH, EPS)
            delta += tl.exp(dot * rstd - top) * share * tl.sum(dx * v, 3)
        if CARRY:
            part = tl.exp(tl.load(value_lse + scalar_at, mask=scalar_live, other=0.0).to(ACC) - top) * share
            gain = tl.sum(dx * tl.load(value + read_at, mask=read_live, other=0.0).to(ACC), 3)
            delta += part * gain
            tl.store(dvalue + read_at, (part[:, :, :, None] * dx).to(dvalue.dtype.element_ty), mask=read_live)
            tl.store(dvalue_lse + scalar_at, part * (gain - delta), mask=scalar_live)
        for n in range(count):
            v = tl.load(source(table, n, like, ALIGNED) + at, mask=live, other=0.0).to(ACC)
            rstd, dot = _dots(v, q, WIDTH, EPS)
            p = tl.exp(dot * rstd - top) * share
            step = tl.where(scalar_live, rstd * p * (tl.sum(dx * v, 3) - delta + of_sum), 0.0)
            sum_queries += tl.sum(step[:, :, :, None] * v, 0)
            if tl.load(gradients + n) != 0:
                # [BT, 1, BH, BE]
                dv = tl.sum(p[:, :, :, None] * dx + step[:, :, :, None] * q, 1)[:, None, :, :]
                turn = tl.sum(tl.sum(step * dot, 2), 1)[:, None, None, None] * (rstd * rstd)[:, :, :, None] / WIDTH
                dv -= turn * v
                if BEFORE:  # noqa: SIM102  a constant, which the compiler takes away with what it guards
                    if tl.load(before + n) != 0:
                        dv += tl.load(source(before, n, like, ALIGNED) + at, mask=live, other=0.0).to(ACC)
                tl.store(source(gradients, n, like, ALIGNED) + at, dv.to(like.dtype.element_ty), mask=live)
        if NULL:
            null = tl.load(nulls + k, mask=k < QUERIES, other=0.0).to(ACC)
            part = tl.where(scalar_live, tl.exp(null[None, :, None] - top) * share * (of_sum - delta), 0.0)
            sum_nulls += tl.sum(tl.sum(part, 2), 0)
    tl.store(dqueries + program.to(tl.int64) * (QUERIES * WIDTH) + q_at, sum_queries, mask=q_live)
    if NULL:
        tl.store(dnulls + program.to(tl.int64) * QUERIES + k, sum_nulls, mask=k < QUERIES)
