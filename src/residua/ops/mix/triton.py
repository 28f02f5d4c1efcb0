"""x_ct = sum_n w_cnt v_nt: static, channel, token and lane mixtures of separate sources, one pass, in Triton.

The weights are read through strides, 0 along an axis they do not have, so that one kernel serves a scalar a source
(static), a scalar a source and token, and lanes of those; a weight a channel has kernels of its own where the sums
differ. Backward saves the inputs and nothing else, and reads each once:

    dv_n = sum_c w_cn dx_c          dw_cnt = <dx_ct, v_nt>

Static weights sum dw over the tokens afterwards, from one number a source and token; a weight a channel is summed by
each program over its own tokens, and over the programs afterwards. `remix` uses these kernels too, its streams being
sources a fixed step apart. No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host
from residua.ops._triton_device import accumulator, source
from residua.ops._triton_table import addresses


@triton.jit
def _place(table, like, n, step, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where source n starts: by the table, or n steps after the first."""
    if TABLE:
        place = source(table, n, like, ALIGNED)
    else:
        place = like + n * step
    return place


@triton.jit
def _forward_kernel(
    table, like, weights, out, count, tokens, step: tl.int64, row: tl.int64,
    weight_lane: tl.int64, weight_source: tl.int64, weight_token: tl.int64, out_lane: tl.int64, out_row: tl.int64,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CHANNEL: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr,
    ACC: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    c = tl.arange(0, BC).to(tl.int64)
    live = (t < tokens)[:, None] & (d < WIDTH)[None, :]
    # [BC, BT, BD]
    mixed = tl.zeros([BC, BT, BD], ACC)
    for n in range(count):
        place = _place(table, like, n, step, TABLE, ALIGNED)
        # [BT, BD]
        v = tl.load(place + t[:, None] * row + d[None, :], mask=live, other=0.0).to(ACC)
        if CHANNEL:
            w = tl.load(weights + n * weight_source + d, mask=d < WIDTH, other=0.0).to(ACC)
            mixed += (w[None, :] * v)[None, :, :]
        else:
            # [BC, BT]
            w_at = c[:, None] * weight_lane + n * weight_source + t[None, :] * weight_token
            w = tl.load(weights + w_at, mask=(c < LANES)[:, None] & (t < tokens)[None, :], other=0.0).to(ACC)
            mixed += w[:, :, None] * v[None, :, :]
    at = c[:, None, None] * out_lane + (t[:, None] * out_row + d[None, :])[None, :, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=(c < LANES)[:, None, None] & live[None, :, :])


@triton.jit
def _backward_kernel(
    table, gradients, like, dlike, weights, dweights, dout, count, tokens, step: tl.int64, row: tl.int64,
    weight_lane: tl.int64, weight_source: tl.int64, weight_token: tl.int64, out_lane: tl.int64, out_row: tl.int64,
    dweight_lane: tl.int64, dweight_source: tl.int64, dweight_token: tl.int64,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr,
    ACC: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    c = tl.arange(0, BC).to(tl.int64)
    live = (t < tokens)[:, None] & (d < WIDTH)[None, :]
    # [BC, BT]
    w_live = (c < LANES)[:, None] & (t < tokens)[None, :]
    # [BC, BT, BD]
    at = c[:, None, None] * out_lane + (t[:, None] * out_row + d[None, :])[None, :, :]
    dx = tl.load(dout + at, mask=(c < LANES)[:, None, None] & live[None, :, :], other=0.0).to(ACC)
    for n in range(count):
        # [BT, BD]
        at_source = t[:, None] * row + d[None, :]
        v = tl.load(_place(table, like, n, step, TABLE, ALIGNED) + at_source, mask=live, other=0.0).to(ACC)
        dw_at = c[:, None] * dweight_lane + n * dweight_source + t[None, :] * dweight_token
        tl.store(dweights + dw_at, tl.sum(dx * v[None, :, :], 2), mask=w_live)
        w_at = c[:, None] * weight_lane + n * weight_source + t[None, :] * weight_token
        w = tl.load(weights + w_at, mask=w_live, other=0.0).to(ACC)
        dv = tl.sum(w[:, :, None] * dx, 0).to(like.dtype.element_ty)
        if TABLE:
            if tl.load(gradients + n) != 0:
                tl.store(source(gradients, n, like, ALIGNED) + at_source, dv, mask=live)
        else:
            tl.store(dlike + n * step + at_source, dv, mask=live)


@triton.jit
def _channel_backward_kernel(
    table, gradients, like, weights, dweights, dout, count, tokens,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    program, n = tl.program_id(0), tl.program_id(1)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    # [BD]
    w = tl.load(weights + n.to(tl.int64) * WIDTH + d, mask=d < WIDTH, other=0.0).to(ACC)
    place, gradient = source(table, n, like, ALIGNED), source(gradients, n, like, ALIGNED)
    wanted = tl.load(gradients + n) != 0
    # [BT, BD]
    share = tl.zeros([BT, BD], ACC)
    for block in range(program, tl.cdiv(tokens, BT), tl.num_programs(0)):
        t = block * BT + tl.arange(0, BT).to(tl.int64)
        at = t[:, None] * WIDTH + d[None, :]
        live = (t < tokens)[:, None] & (d < WIDTH)[None, :]
        dx = tl.load(dout + at, mask=live, other=0.0).to(ACC)
        share += dx * tl.load(place + at, mask=live, other=0.0).to(ACC)
        if wanted:
            tl.store(gradient + at, (w[None, :] * dx).to(like.dtype.element_ty), mask=live)
    into = dweights + (program.to(tl.int64) * count + n) * WIDTH + d
    tl.store(into, tl.sum(share, 0), mask=d < WIDTH)


def strides(weights: Tensor) -> tuple[int, int, int]:
    """Steps of contiguous weights from one lane, source and token to the next; 0 where there is no such axis."""
    tokens = weights[0].numel() if weights.ndim == 3 else weights[0, 0].numel() if weights.ndim == 4 else 0
    return {
        1: (0, 1, 0),
        2: (0, weights.shape[-1], 0),
        3: (0, tokens, 1),
        4: (weights[0].numel(), tokens, 1),
    }[weights.ndim]


def blocks(lanes: int, width: int, *, whole: bool) -> dict[str, int]:
    """Block sizes for rows of `width`, `whole` where a sum runs over the width."""
    block_lanes = host.power(lanes)
    block_width = host.power(width) if whole else min(host.power(width), max(128, 1024 // block_lanes))
    block_tokens = host.tokens_a_block(block_lanes * block_width)
    # 8 numbers of a source a thread: a load of 16 bytes in bfloat16, however many lanes add it up
    warps = min(16, max(1, block_tokens * block_width // 256))
    return {"BC": block_lanes, "BT": block_tokens, "BD": block_width, "warps": warps}


@torch.library.custom_op("residua_triton::mix", mutates_args=())
def _mix(weights: Tensor, sources: list[Tensor]) -> Tensor:
    sources, weights = [one.contiguous() for one in sources], weights.contiguous()
    like, width = sources[0], sources[0].shape[-1]
    tokens, lanes = like.numel() // width, weights.shape[0] if weights.ndim == 4 else 1
    out = like.new_empty(((lanes,) if weights.ndim == 4 else ()) + like.shape)
    settings = blocks(lanes, width, whole=False)
    host.launch(
        _forward_kernel, (triton.cdiv(tokens, settings["BT"]), triton.cdiv(width, settings["BD"])), like,
        addresses(sources, like), like, weights, out, len(sources), tokens,
        0, width, *strides(weights), tokens * width, width,
        WIDTH=width, LANES=lanes, CHANNEL=weights.ndim == 2, TABLE=True,
        ALIGNED=host.aligned(sources, width), ACC=accumulator(like.dtype), **settings,
    )  # fmt: skip
    return out


@_mix.register_fake
def _(weights, sources):
    return sources[0].new_empty((weights.shape[:1] if weights.ndim == 4 else ()) + sources[0].shape)


@torch.library.custom_op("residua_triton::mix_backward", mutates_args=())
def _mix_backward(dout: Tensor, weights: Tensor, sources: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    sources, weights, dout = [one.contiguous() for one in sources], weights.contiguous(), dout.contiguous()
    like, width, count = sources[0], sources[0].shape[-1], len(sources)
    tokens, lanes = like.numel() // width, weights.shape[0] if weights.ndim == 4 else 1
    gradients = [torch.empty_like(one) if want else None for one, want in zip(sources, wanted, strict=True)]
    places = addresses(sources, like), addresses(gradients, like)
    wide = torch.promote_types(like.dtype, torch.float32)
    common = {
        "WIDTH": width, "ALIGNED": host.aligned([*sources, *gradients], width), "ACC": accumulator(like.dtype),
    }  # fmt: skip
    if weights.ndim == 2:
        settings = blocks(1, width, whole=False)
        del settings["BC"]
        shares = max(1, host.programs(like) // count)
        grid = (min(shares, triton.cdiv(tokens, settings["BT"])), count, triton.cdiv(width, settings["BD"]))
        dweights = torch.empty(grid[0], count, width, dtype=wide, device=like.device)
        host.launch(
            _channel_backward_kernel, grid, like,
            *places, like, weights, dweights, dout, count, tokens, **common, **settings,
        )  # fmt: skip
        dweights = dweights.sum(0)
    else:
        settings = blocks(lanes, width, whole=True)
        dweights = torch.empty(lanes, count, tokens, dtype=wide, device=like.device)
        host.launch(
            _backward_kernel, (triton.cdiv(tokens, settings["BT"]),), like,
            *places, like, like, weights, dweights, dout, count, tokens,
            0, width, *strides(weights), tokens * width, width, count * tokens, tokens, 1,
            LANES=lanes, TABLE=True, **common, **settings,
        )  # fmt: skip
        dweights = dweights.sum(-1)[0] if weights.ndim == 1 else dweights.view(weights.shape)
    return [dweights.to(weights.dtype), *(one for one in gradients if one is not None)]


@_mix_backward.register_fake
def _(dout, weights, sources, wanted):
    contiguous = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (weights, *sources)]
    return [one for one, want in zip(contiguous, (True, *wanted), strict=True) if want]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, sources = inputs
    ctx.save_for_backward(weights, *sources)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    weights, *sources = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[1])
    shares = iter(_mix_backward(dout, weights, sources, wanted))
    return next(shares), [next(shares) if want else None for want in wanted]


_mix.register_autograd(_backward, setup_context=_save)


def mix(weights: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """`residua.ops.mix` on a GPU."""
    host.checked(weights, *sources)
    return _mix(weights, list(host.alike(sources)))
