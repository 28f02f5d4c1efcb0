"""y_t = softmax_j(q_t . k_j / sqrt(e) + b_(t-j)) v_j over the keys in the window, in Triton, linear in the sequence.

Positions are data and may come in any order, as in a ring. So every block of queries and of keys is given the least
and the greatest of its positions first; a program then passes over the run of blocks that its own can see or be seen
by, and masks inside them. For positions that ascend that run is as long as the window, however long the text.

Backward is FlashAttention's: saved are q, k, v, the output and a number a query; one kernel walks the keys of a block
of queries (dq and the bias), one the queries of a block of keys (dk, dv), all heads that share the key head included.
Nothing is added by atomics: the bias is summed by distance in each program, then over the programs. No GPU has timed
this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host
from residua.ops._backend import Unsupported
from residua.ops._triton_device import accumulator, product
from residua.ops.window_attend import reference

FAR = tl.constexpr(1 << 60)
"""A position beyond every position, twice which still fits 64 bits."""
NEAR = tl.constexpr(1 << 28)
"""What counts as far away for positions that are read together; empty queries and keys are farther, on either side."""
NO_QUERY, NO_KEY = tl.constexpr(-(1 << 30)), tl.constexpr(1 << 30)
SCAN = 128
"""Blocks whose bounds a program looks at together."""


@triton.jit
def _bounds_kernel(positions, bounds, count, B: tl.constexpr):
    """The least and the greatest position of each block; negative ones are empty and do not count."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * B + tl.arange(0, B)
    p = tl.load(positions + row * count + i, mask=i < count, other=-1).to(tl.int64)
    into = bounds + (row * tl.num_programs(0) + block) * 2
    tl.store(into, tl.min(tl.where(p < 0, FAR, p), 0))
    tl.store(into + 1, tl.max(tl.where(p < 0, -FAR, p), 0))


@triton.jit
def _span(
    bounds, blocks, low, high, window,
    KEYS: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The run of blocks that positions from `low` to `high` may meet: of key blocks if KEYS, else of query blocks."""
    first, last = blocks, 0
    for start in range(0, blocks, SCAN):
        i = start + tl.arange(0, SCAN)
        other_low = tl.load(bounds + 2 * i, mask=i < blocks, other=FAR)
        other_high = tl.load(bounds + 2 * i + 1, mask=i < blocks, other=-FAR)
        meets = (other_high >= 0) & (high >= 0)
        if LOCAL:
            meets = meets & (other_low // window <= high // window) & (other_high // window >= low // window)
        else:
            meets = meets & (other_low - high < window) & (low - other_high < window)
        if CAUSAL:
            if KEYS:
                meets = meets & (other_low <= high)
            else:
                meets = meets & (low <= other_high)
        first = tl.minimum(first, tl.min(tl.where(meets, i, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, i + 1, 0), 0))
    return first, last


@triton.jit
def _places(positions, i, count, low, window, EMPTY: tl.constexpr, LOCAL: tl.constexpr):
    """Positions from the start of low's window on, and their blocks under mode=local; EMPTY for what sees nothing.

    In 32 bits: only differences matter, and a program holds a block of them, of which 64-bit ones do not fit.
    """
    p = tl.load(positions + i, mask=i < count, other=-1).to(tl.int64)
    at = tl.minimum(tl.maximum(p - low // window * window, -NEAR), NEAR).to(tl.int32)
    home = at
    if LOCAL:
        # the quotient of a negative number is rounded up
        home = tl.where(p < 0, EMPTY, tl.where(at < 0, at - window + 1, at) // window)
    return tl.where(p < 0, EMPTY, at), home


@triton.jit
def _scores(
    q, k, query_at, query_home, key_at, key_home, bias, window,
    SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The logits of a block, -inf where a key is not seen, and the distances; `bias` is the row of the head."""
    distance = query_at[:, None] - key_at[None, :]
    if LOCAL:
        seen = query_home[:, None] == key_home[None, :]
    else:
        seen = distance < window
        if not CAUSAL:
            seen = seen & (distance > -window)
    if CAUSAL:
        seen = seen & (distance >= 0)
    else:
        distance += window - 1
    s = product(q, tl.trans(k), ACC, WIDEN) * SCALE
    if BIAS:
        s += tl.load(bias + distance, mask=seen, other=0.0).to(ACC)
    return tl.where(seen, s, float("-inf")), distance


@triton.jit
def _forward_kernel(
    q, k, v, bias, out, lse, queries, keys, query_bounds, key_bounds,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % query_blocks, tl.program_id(0) // query_blocks
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    i = block * BQ + tl.arange(0, BQ)
    e = tl.arange(0, BE)
    query_bounds += (batch * QUERY_ROWS * query_blocks + block) * 2
    low, high = tl.load(query_bounds), tl.load(query_bounds + 1)
    first, last = _span(
        key_bounds + batch * KEY_ROWS * key_blocks * 2, key_blocks, low, high, window, True, LOCAL, CAUSAL, SCAN
    )
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    query_at, query_home = _places(queries, i, tokens, low, window, NO_QUERY, LOCAL)
    # [BQ, BE]
    q_live = (i < tokens)[:, None] & (e < WIDTH)[None, :]
    b_q = tl.load(q + batch * q_batch + head * q_head + i[:, None] * q_token + e[None, :], mask=q_live, other=0.0)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    top = tl.full([BQ], float("-inf"), ACC)
    mass = tl.zeros([BQ], ACC)
    mixed = tl.zeros([BQ, BE], ACC)
    for key_block in range(first, last):
        j = key_block * BK + tl.arange(0, BK)
        k_live = (j < total)[:, None] & (e < WIDTH)[None, :]
        key_at, key_home = _places(keys, j, total, low, window, NO_KEY, LOCAL)
        b_k = tl.load(k + j[:, None] * k_token + e[None, :], mask=k_live, other=0.0)
        b_v = tl.load(v + j[:, None] * v_token + e[None, :], mask=k_live, other=0.0)
        s, _ = _scores(
            b_q, b_k, query_at, query_home, key_at, key_home, bias + head * reach, window,
            SCALE, BIAS, LOCAL, CAUSAL, ACC, WIDEN,
        )  # fmt: skip
        peak = tl.maximum(top, tl.max(s, 1))
        # a query that has seen nothing yet has no greatest logit: -inf - -inf would be no number
        floor = tl.where(peak == float("-inf"), 0.0, peak)
        decay, p = tl.exp(top - floor), tl.exp(s - floor[:, None])
        mass = mass * decay + tl.sum(p, 1)
        mixed = mixed * decay[:, None] + product(p.to(b_v.dtype), b_v, ACC, WIDEN)
        top = peak
    blind = mass == 0
    mixed = mixed / tl.where(blind, 1.0, mass)[:, None]
    row = both.to(tl.int64) * tokens + i
    tl.store(out + row[:, None] * WIDTH + e[None, :], mixed.to(out.dtype.element_ty), mask=q_live)
    # so that exp(logit - lse) is 0 in the backward pass
    tl.store(lse + row, tl.where(blind, float("inf"), top + tl.log(tl.where(blind, 1.0, mass))), mask=i < tokens)


@triton.jit
def _query_backward_kernel(
    q, k, v, bias, out, lse, queries, keys, query_bounds, key_bounds, dout, delta, dq, dbias,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % query_blocks, tl.program_id(0) // query_blocks
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    i = block * BQ + tl.arange(0, BQ)
    e = tl.arange(0, BE)
    query_bounds += (batch * QUERY_ROWS * query_blocks + block) * 2
    low, high = tl.load(query_bounds), tl.load(query_bounds + 1)
    first, last = _span(
        key_bounds + batch * KEY_ROWS * key_blocks * 2, key_blocks, low, high, window, True, LOCAL, CAUSAL, SCAN
    )
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    query_at, query_home = _places(queries, i, tokens, low, window, NO_QUERY, LOCAL)
    # [BQ, BE]
    q_live = (i < tokens)[:, None] & (e < WIDTH)[None, :]
    b_q = tl.load(q + batch * q_batch + head * q_head + i[:, None] * q_token + e[None, :], mask=q_live, other=0.0)
    row = both.to(tl.int64) * tokens + i
    at = row[:, None] * WIDTH + e[None, :]
    dy = tl.load(dout + at, mask=q_live, other=0.0)
    # [BQ]
    norm = tl.load(lse + row, mask=i < tokens, other=float("inf"))
    change = tl.sum(dy.to(ACC) * tl.load(out + at, mask=q_live, other=0.0).to(ACC), 1)
    tl.store(delta + row, change, mask=i < tokens)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    b_dq = tl.zeros([BQ, BE], ACC)
    r = tl.arange(0, BR)
    by_distance = tl.zeros([BR], ACC)
    for key_block in range(first, last):
        j = key_block * BK + tl.arange(0, BK)
        k_live = (j < total)[:, None] & (e < WIDTH)[None, :]
        key_at, key_home = _places(keys, j, total, low, window, NO_KEY, LOCAL)
        b_k = tl.load(k + j[:, None] * k_token + e[None, :], mask=k_live, other=0.0)
        b_v = tl.load(v + j[:, None] * v_token + e[None, :], mask=k_live, other=0.0)
        s, distance = _scores(
            b_q, b_k, query_at, query_home, key_at, key_home, bias + head * reach, window,
            SCALE, BIAS, LOCAL, CAUSAL, ACC, WIDEN,
        )  # fmt: skip
        # [BQ, BK]
        p = tl.exp(s - norm[:, None])
        dp = product(dy, tl.trans(b_v), ACC, WIDEN)
        ds = p * (dp - change[:, None])
        b_dq += product(ds.to(b_k.dtype), b_k, ACC, WIDEN) * SCALE
        if BIAS:
            for one in range(reach):
                by_distance += tl.where(r == one, tl.sum(tl.sum(tl.where(distance == one, ds, 0.0), 1), 0), 0.0)
    tl.store(dq + at, b_dq.to(dq.dtype.element_ty), mask=q_live)
    if BIAS:
        tl.store(dbias + tl.program_id(0).to(tl.int64) * reach + r, by_distance, mask=r < reach)


@triton.jit
def _key_backward_kernel(
    q, k, v, bias, lse, queries, keys, query_bounds, key_bounds, dout, delta, dk, dv,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % key_blocks, tl.program_id(0) // key_blocks
    shared = heads // GROUP
    batch, kv = (both // shared).to(tl.int64), (both % shared).to(tl.int64)
    j = block * BK + tl.arange(0, BK)
    e = tl.arange(0, BE)
    key_bounds += (batch * KEY_ROWS * key_blocks + block) * 2
    low, high = tl.load(key_bounds), tl.load(key_bounds + 1)
    first, last = _span(
        query_bounds + batch * QUERY_ROWS * query_blocks * 2, query_blocks, low, high, window,
        False, LOCAL, CAUSAL, SCAN,
    )  # fmt: skip
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    key_at, key_home = _places(keys, j, total, low, window, NO_KEY, LOCAL)
    # [BK, BE]
    k_live = (j < total)[:, None] & (e < WIDTH)[None, :]
    b_k = tl.load(k + batch * k_batch + kv * k_head + j[:, None] * k_token + e[None, :], mask=k_live, other=0.0)
    b_v = tl.load(v + batch * v_batch + kv * v_head + j[:, None] * v_token + e[None, :], mask=k_live, other=0.0)
    b_dk = tl.zeros([BK, BE], ACC)
    b_dv = tl.zeros([BK, BE], ACC)
    for member in range(GROUP):
        head = kv * GROUP + member
        for query_block in range(first, last):
            i = query_block * BQ + tl.arange(0, BQ)
            q_live = (i < tokens)[:, None] & (e < WIDTH)[None, :]
            query_at, query_home = _places(queries, i, tokens, low, window, NO_QUERY, LOCAL)
            q_at = batch * q_batch + head * q_head + i[:, None] * q_token + e[None, :]
            b_q = tl.load(q + q_at, mask=q_live, other=0.0)
            row = (batch * heads + head) * tokens + i
            dy = tl.load(dout + row[:, None] * WIDTH + e[None, :], mask=q_live, other=0.0)
            norm = tl.load(lse + row, mask=i < tokens, other=float("inf"))
            change = tl.load(delta + row, mask=i < tokens, other=0.0)
            s, _ = _scores(
                b_q, b_k, query_at, query_home, key_at, key_home, bias + head * reach, window,
                SCALE, BIAS, LOCAL, CAUSAL, ACC, WIDEN,
            )  # fmt: skip
            # [BQ, BK]
            p = tl.exp(s - norm[:, None])
            b_dv += product(tl.trans(p.to(dy.dtype)), dy, ACC, WIDEN)
            dp = product(dy, tl.trans(b_v), ACC, WIDEN)
            ds = p * (dp - change[:, None])
            b_dk += product(tl.trans(ds.to(b_q.dtype)), b_q, ACC, WIDEN) * SCALE
    into = ((batch * shared + kv) * total + j)[:, None] * WIDTH + e[None, :]
    tl.store(dk + into, b_dk.to(dk.dtype.element_ty), mask=k_live)
    tl.store(dv + into, b_dv.to(dv.dtype.element_ty), mask=k_live)


def _packed(x: Tensor) -> Tensor:
    """x with its last axis dense; the others are read through their strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bounds(positions: Tensor, size: int) -> Tensor:
    rows, count = positions.shape[:-1].numel(), positions.shape[-1]
    blocks = triton.cdiv(count, size)
    bounds = torch.empty(rows, blocks, 2, dtype=torch.int64, device=positions.device)
    host.launch(_bounds_kernel, (blocks, rows), positions, positions, bounds, count, B=size)
    return bounds


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, queries: Tensor, keys: Tensor,
    window: int, local: bool, causal: bool,
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """What every kernel takes: the blocks' bounds, the sizes and the settings."""
    heads, tokens, width = q.shape[1:]
    total = k.shape[2]
    # as large as the registers of an A100 hold: a float32 product is not rounded to TF32, and takes more of them
    largest = 32 if q.element_size() == 2 and width <= 128 else 16
    warps = 4 if q.element_size() == 2 or width <= 64 else 8
    query_block, key_block = (min(largest, max(16, host.power(length))) for length in (tokens, total))
    bounds = _bounds(queries, query_block), _bounds(keys, key_block)
    sizes = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        heads, tokens, total, bounds[0].shape[1], bounds[1].shape[1], window, window if causal else 2 * window - 1,
    )  # fmt: skip
    settings = {
        "GROUP": heads // k.shape[1], "WIDTH": width, "SCALE": width**-0.5, "BIAS": bias is not None,
        "LOCAL": local, "CAUSAL": causal, "QUERY_ROWS": int(queries.ndim == 2), "KEY_ROWS": int(keys.ndim == 2),
        "ACC": accumulator(q.dtype), "BQ": query_block, "BK": key_block, "BE": max(16, host.power(width)),
        "SCAN": SCAN, "WIDEN": triton.knobs.runtime.interpret, "warps": warps,
    }  # fmt: skip
    return bounds, sizes, settings


@torch.library.custom_op("residua_triton::window_attend", mutates_args=())
def _window_attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, queries: Tensor, keys: Tensor,
    window: int, local: bool, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, queries, keys = _packed(q), _packed(k), _packed(v), queries.contiguous(), keys.contiguous()
    bounds, sizes, settings = _arguments(q, k, v, bias, queries, keys, window, local, causal)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    host.launch(
        _forward_kernel, (bounds[0].shape[1] * q.shape[0] * q.shape[1],), q,
        q, k, v, q if bias is None else bias.contiguous(), out, lse, queries, keys, *bounds, *sizes,
        num_stages=2, **settings,
    )  # fmt: skip
    return out, lse


@_window_attend.register_fake
def _(q, k, v, bias, queries, keys, window, local, causal):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("residua_triton::window_attend_backward", mutates_args=())
def _window_attend_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    queries: Tensor, keys: Tensor, window: int, local: bool, causal: bool,
) -> list[Tensor]:  # fmt: skip
    q, k, v, queries, keys = _packed(q), _packed(k), _packed(v), queries.contiguous(), keys.contiguous()
    dout = dout.contiguous()
    bounds, sizes, settings = _arguments(q, k, v, bias, queries, keys, window, local, causal)
    dq, dk, dv = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    delta = torch.empty_like(lse)
    blocks, reach = bounds[0].shape[1], sizes[-1]
    dbias = torch.empty(*q.shape[:2], blocks, reach if bias is not None else 0, dtype=lse.dtype, device=q.device)
    table = q if bias is None else bias.contiguous()
    host.launch(
        _query_backward_kernel, (blocks * q.shape[0] * q.shape[1],), q,
        q, k, v, table, out, lse, queries, keys, *bounds, dout, delta, dq, dbias, *sizes,
        BR=host.power(reach), num_stages=2, **settings,
    )  # fmt: skip
    host.launch(
        _key_backward_kernel, (bounds[1].shape[1] * k.shape[0] * k.shape[1],), q,
        q, k, v, table, lse, queries, keys, *bounds, dout, delta, dk, dv, *sizes,
        num_stages=1, **settings,
    )  # fmt: skip
    return [dq, dk, dv] + ([] if bias is None else [dbias.sum((0, 2)).to(bias.dtype)])


@_window_attend_backward.register_fake
def _(dout, out, lse, q, k, v, bias, queries, keys, window, local, causal):
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, queries, keys, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, bias, queries, keys)


def _backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 9
    dq, dk, dv, *dbias = _window_attend_backward(dout, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, dbias[0] if dbias else None, *(None,) * 5


_window_attend.register_autograd(_backward, setup_context=_save)


def window_attend(
    q: Tensor, k: Tensor, v: Tensor, *,
    window: int, mode: str, queries: Tensor | None, keys: Tensor | None, causal: bool, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`residua.ops.window_attend` on a GPU."""
    if mode not in ("sliding", "local"):
        raise ValueError(f"window_attend: mode is sliding or local, not {mode!r}")
    host.checked(q, k, v, *([] if bias is None else [bias]))
    if not q.dtype == k.dtype == v.dtype:
        raise Unsupported(f"q, k and v of {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[-1] > 256:
        raise Unsupported(f"heads of {q.shape[-1]}: at most 256 fit a block")
    queries, keys = reference.default_positions(q, k, queries, keys)
    out, _ = _window_attend(q, k, v, bias, queries, keys, window, mode == "local", causal)
    return out
