"""What a GPU runs of window_attend: the bounds of every block, the forward pass, and backward by queries and by keys.

A program has one block of queries, or of keys, and walks the blocks of the other that `_span` finds; `_places` and
`_rows` bring a block in, `_scores` are its logits. Layouts are q [b, heads, tokens, width] and k, v [b, heads / GROUP,
total, width], through strides; outputs and gradients are dense.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._triton_device import product

FAR = tl.constexpr(1 << 60)
"""A position beyond every position, twice which still fits 64 bits."""
NEAR = tl.constexpr(1 << 28)
"""What counts as far away for positions that are read together; empty queries and keys are farther, on either side."""
NO_QUERY, NO_KEY = tl.constexpr(-(1 << 30)), tl.constexpr(1 << 30)
SCAN = tl.constexpr(128)
"""Blocks whose bounds a program looks at together."""


@triton.jit
def bounds_kernel(positions, bounds, count, B: tl.constexpr):
    """The least and the greatest position of each block; negative ones are empty and do not count."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * B + tl.arange(0, B)
    p = tl.load(positions + row * count + i, mask=i < count, other=-1).to(tl.int64)
    into = bounds + (row * tl.num_programs(0) + block) * 2
    tl.store(into, tl.min(tl.where(p < 0, FAR, p), 0))
    tl.store(into + 1, tl.max(tl.where(p < 0, -FAR, p), 0))


@triton.jit
def _span(own, bounds, blocks, window, KEYS: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """The least position of a block whose bounds are at `own`, and the run of blocks that it may meet.

    Those are key blocks if KEYS, else query blocks.
    """
    low, high = tl.load(own), tl.load(own + 1)
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
    return low, first, last


@triton.jit
def _places(
    positions, block, count, low, window,
    EMPTY: tl.constexpr, LOCAL: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The numbers i of a block's tokens, which of its [B, BE] numbers there are, and where its tokens are.

    That is positions from the start of low's window on, and their windows under mode=local; EMPTY for what sees
    nothing. In 32 bits: only differences matter, and a program holds a block of them, of which 64-bit ones do not fit.
    """
    i = block * B + tl.arange(0, B)
    live = (i < count)[:, None] & (tl.arange(0, BE) < WIDTH)[None, :]
    p = tl.load(positions + i, mask=i < count, other=-1).to(tl.int64)
    at = tl.minimum(tl.maximum(p - low // window * window, -NEAR), NEAR).to(tl.int32)
    home = at
    if LOCAL:
        # the quotient of a negative number is rounded up
        home = tl.where(p < 0, EMPTY, tl.where(at < 0, at - window + 1, at) // window)
    return i, live, tl.where(p < 0, EMPTY, at), home


@triton.jit
def _at(x, i, step, BE: tl.constexpr):
    """Where the numbers of the rows i of x are."""
    return x + (i[:, None] * step + tl.arange(0, BE)[None, :])


@triton.jit
def _rows(x, i, live, step, BE: tl.constexpr):
    """The rows i of x, [B, BE]."""
    return tl.load(_at(x, i, step, BE), mask=live, other=0.0)


@triton.jit
def _put(x, i, live, rows, step, BE: tl.constexpr):
    """Write the rows i of x."""
    tl.store(_at(x, i, step, BE), rows.to(x.dtype.element_ty), mask=live)


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
def _pulled(p, change, dy, v, ACC: tl.constexpr, WIDEN: tl.constexpr):
    """The gradient of the logits, [BQ, BK], from the weights."""
    return p * (product(dy, tl.trans(v), ACC, WIDEN) - change[:, None])


@triton.jit
def forward_kernel(
    q, k, v, bias, out, lse, queries, keys, query_bounds, key_bounds,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % query_blocks, tl.program_id(0) // query_blocks
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    own = query_bounds + (batch * QUERY_ROWS * query_blocks + block) * 2
    others = key_bounds + batch * KEY_ROWS * key_blocks * 2
    low, first, last = _span(own, others, key_blocks, window, True, LOCAL, CAUSAL)
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    i, q_live, query_at, query_home = _places(queries, block, tokens, low, window, NO_QUERY, LOCAL, WIDTH, BQ, BE)
    b_q = _rows(q + batch * q_batch + head * q_head, i, q_live, q_token, BE)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    top = tl.full([BQ], float("-inf"), ACC)
    mass = tl.zeros([BQ], ACC)
    mixed = tl.zeros([BQ, BE], ACC)
    for key_block in range(first, last):
        j, k_live, key_at, key_home = _places(keys, key_block, total, low, window, NO_KEY, LOCAL, WIDTH, BK, BE)
        b_k, b_v = _rows(k, j, k_live, k_token, BE), _rows(v, j, k_live, v_token, BE)
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
    _put(out, row, q_live, mixed, WIDTH, BE)
    # so that exp(logit - lse) is 0 in the backward pass
    tl.store(lse + row, tl.where(blind, float("inf"), top + tl.log(tl.where(blind, 1.0, mass))), mask=i < tokens)


@triton.jit
def query_backward_kernel(
    q, k, v, bias, out, lse, queries, keys, query_bounds, key_bounds, dout, delta, dq, dbias,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % query_blocks, tl.program_id(0) // query_blocks
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    own = query_bounds + (batch * QUERY_ROWS * query_blocks + block) * 2
    others = key_bounds + batch * KEY_ROWS * key_blocks * 2
    low, first, last = _span(own, others, key_blocks, window, True, LOCAL, CAUSAL)
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    i, q_live, query_at, query_home = _places(queries, block, tokens, low, window, NO_QUERY, LOCAL, WIDTH, BQ, BE)
    b_q = _rows(q + batch * q_batch + head * q_head, i, q_live, q_token, BE)
    row = both.to(tl.int64) * tokens + i
    dy = _rows(dout, row, q_live, WIDTH, BE)
    # [BQ]
    norm = tl.load(lse + row, mask=i < tokens, other=float("inf"))
    change = tl.sum(dy.to(ACC) * _rows(out, row, q_live, WIDTH, BE).to(ACC), 1)
    tl.store(delta + row, change, mask=i < tokens)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    b_dq = tl.zeros([BQ, BE], ACC)
    r = tl.arange(0, BR)
    by_distance = tl.zeros([BR], ACC)
    for key_block in range(first, last):
        j, k_live, key_at, key_home = _places(keys, key_block, total, low, window, NO_KEY, LOCAL, WIDTH, BK, BE)
        b_k, b_v = _rows(k, j, k_live, k_token, BE), _rows(v, j, k_live, v_token, BE)
        s, distance = _scores(
            b_q, b_k, query_at, query_home, key_at, key_home, bias + head * reach, window,
            SCALE, BIAS, LOCAL, CAUSAL, ACC, WIDEN,
        )  # fmt: skip
        ds = _pulled(tl.exp(s - norm[:, None]), change, dy, b_v, ACC, WIDEN)
        b_dq += product(ds.to(b_k.dtype), b_k, ACC, WIDEN) * SCALE
        if BIAS:
            for one in range(reach):
                by_distance += tl.where(r == one, tl.sum(tl.sum(tl.where(distance == one, ds, 0.0), 1), 0), 0.0)
    _put(dq, row, q_live, b_dq, WIDTH, BE)
    if BIAS:
        tl.store(dbias + tl.program_id(0).to(tl.int64) * reach + r, by_distance, mask=r < reach)


@triton.jit
def key_backward_kernel(
    q, k, v, bias, lse, queries, keys, query_bounds, key_bounds, dout, delta, dk, dv,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    heads, tokens, total, query_blocks, key_blocks, window, reach,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, LOCAL: tl.constexpr,
    CAUSAL: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    block, both = tl.program_id(0) % key_blocks, tl.program_id(0) // key_blocks
    shared = heads // GROUP
    batch, kv = (both // shared).to(tl.int64), (both % shared).to(tl.int64)
    own = key_bounds + (batch * KEY_ROWS * key_blocks + block) * 2
    others = query_bounds + batch * QUERY_ROWS * query_blocks * 2
    low, first, last = _span(own, others, query_blocks, window, False, LOCAL, CAUSAL)
    queries += batch * QUERY_ROWS * tokens
    keys += batch * KEY_ROWS * total
    j, k_live, key_at, key_home = _places(keys, block, total, low, window, NO_KEY, LOCAL, WIDTH, BK, BE)
    b_k = _rows(k + batch * k_batch + kv * k_head, j, k_live, k_token, BE)
    b_v = _rows(v + batch * v_batch + kv * v_head, j, k_live, v_token, BE)
    b_dk = tl.zeros([BK, BE], ACC)
    b_dv = tl.zeros([BK, BE], ACC)
    for member in range(GROUP):
        head = kv * GROUP + member
        for query_block in range(first, last):
            i, q_live, query_at, query_home = _places(
                queries, query_block, tokens, low, window, NO_QUERY, LOCAL, WIDTH, BQ, BE
            )
            b_q = _rows(q + batch * q_batch + head * q_head, i, q_live, q_token, BE)
            row = (batch * heads + head) * tokens + i
            dy = _rows(dout, row, q_live, WIDTH, BE)
            norm = tl.load(lse + row, mask=i < tokens, other=float("inf"))
            change = tl.load(delta + row, mask=i < tokens, other=0.0)
            s, _ = _scores(
                b_q, b_k, query_at, query_home, key_at, key_home, bias + head * reach, window,
                SCALE, BIAS, LOCAL, CAUSAL, ACC, WIDEN,
            )  # fmt: skip
            p = tl.exp(s - norm[:, None])
            b_dv += product(tl.trans(p.to(dy.dtype)), dy, ACC, WIDEN)
            ds = _pulled(p, change, dy, b_v, ACC, WIDEN)
            b_dk += product(tl.trans(ds.to(b_q.dtype)), b_q, ACC, WIDEN) * SCALE
    into = (batch * shared + kv) * total + j
    _put(dk, into, k_live, b_dk, WIDTH, BE)
    _put(dv, into, k_live, b_dv, WIDTH, BE)
