"""y[t] = sum_s taps[s] x[t - s]: a short causal convolution over tokens, in Triton.

A program takes a block of tokens and channels of one sequence, and finds the tokens before it in the cache. Backward, a
token of the history, tail included, gets sum_s taps[s] dy[t + s]; a tap's gradient is a sum over tokens, one partial
sum a program, added up afterwards. No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.native.guard import Unsupported
from residua.ops import _triton as host
from residua.ops import norm
from residua.ops._context import Context, Inputs
from residua.ops._triton_device import accumulator


@triton.jit
def _history(x, tail, row, t, c, tokens, TAPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """Tokens t of one sequence, [BT, BC]; those below 0 are of the tail."""
    at = (row * tokens + t)[:, None] * WIDTH + c[None, :]
    inside = (t >= 0) & (t < tokens)
    value = tl.load(x + at, mask=inside[:, None] & (c < WIDTH)[None, :], other=0.0).to(ACC)
    if TAPS > 1:
        at = (row * (TAPS - 1) + t + TAPS - 1)[:, None] * WIDTH + c[None, :]
        value += tl.load(tail + at, mask=(t < 0)[:, None] & (c < WIDTH)[None, :], other=0.0).to(ACC)
    return value


@triton.jit
def _forward_kernel(
    x, tail, taps, out, tokens, TAPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BT, BC], ACC)
    for s in tl.static_range(TAPS):
        tap = tl.load(taps + s * WIDTH + c, mask=c < WIDTH, other=0.0).to(ACC)
        total += tap[None, :] * _history(x, tail, row, t - s, c, tokens, TAPS, WIDTH, ACC)
    at = (row * tokens + t)[:, None] * WIDTH + c[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < WIDTH)[None, :])


@triton.jit
def _history_backward_kernel(
    taps, dout, dx, dtail, tokens, TAPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    # the history begins with the tail
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT) - (TAPS - 1)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = (c < WIDTH)[None, :]
    total = tl.zeros([BT, BC], ACC)
    for s in tl.static_range(TAPS):
        tap = tl.load(taps + s * WIDTH + c, mask=c < WIDTH, other=0.0).to(ACC)
        later = t + s
        at = (row * tokens + later)[:, None] * WIDTH + c[None, :]
        dy = tl.load(dout + at, mask=((later >= 0) & (later < tokens))[:, None] & live, other=0.0).to(ACC)
        total += tap[None, :] * dy
    at = (row * tokens + t)[:, None] * WIDTH + c[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=((t >= 0) & (t < tokens))[:, None] & live)
    if TAPS > 1:
        at = (row * (TAPS - 1) + t + TAPS - 1)[:, None] * WIDTH + c[None, :]
        tl.store(dtail + at, total.to(dtail.dtype.element_ty), mask=(t < 0)[:, None] & live)


@triton.jit
def _taps_backward_kernel(
    x, tail, dout, dtaps, tokens, rows, TAPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program, s = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    blocks = tl.cdiv(tokens, BT)
    total = tl.zeros([BT, BC], ACC)
    for block in range(program, rows * blocks, tl.num_programs(0)):
        row = (block // blocks).to(tl.int64)
        t = (block % blocks) * BT + tl.arange(0, BT).to(tl.int64)
        at = (row * tokens + t)[:, None] * WIDTH + c[None, :]
        dy = tl.load(dout + at, mask=(t < tokens)[:, None] & (c < WIDTH)[None, :], other=0.0).to(ACC)
        total += dy * _history(x, tail, row, t - s, c, tokens, TAPS, WIDTH, ACC)
    into = dtaps + (program.to(tl.int64) * TAPS + s) * WIDTH + c
    tl.store(into, tl.sum(total, 0), mask=c < WIDTH)


def _settings(x: Tensor, taps: Tensor) -> tuple[int, host.Settings]:
    """Blocks of channels, and the constants of a kernel."""
    width = taps[0].numel()
    block_width = min(512, host.power(width))
    block_tokens = min(host.tokens_a_block(block_width), host.power(x.shape[1]))
    return triton.cdiv(width, block_width), {
        "TAPS": len(taps), "WIDTH": width, "ACC": accumulator(x.dtype), "BT": block_tokens, "BC": block_width,
        "warps": host.warps(block_tokens * block_width),
    }  # fmt: skip


@torch.library.custom_op("residua_triton::shortconv", mutates_args=())
def _shortconv(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    x, tail, taps = x.contiguous(), tail.contiguous(), taps.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        columns, settings = _settings(x, taps)
        grid = (triton.cdiv(x.shape[1], settings["BT"]), columns, x.shape[0])
        host.launch(_forward_kernel, grid, x, x, tail, taps, out, x.shape[1], **settings)
    return out


@_shortconv.register_fake
def _(x, tail, taps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("residua_triton::shortconv_backward", mutates_args=())
def _shortconv_backward(dout: Tensor, x: Tensor, tail: Tensor, taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dout, x, tail, taps = (one.contiguous() for one in (dout, x, tail, taps))
    dx, dtail = torch.empty_like(x), torch.empty_like(tail)
    if not dout.numel():
        return dx, dtail.zero_(), torch.zeros_like(taps)
    (rows, tokens), (columns, settings) = x.shape[:2], _settings(x, taps)
    grid = (triton.cdiv(tokens + len(taps) - 1, settings["BT"]), columns, rows)
    host.launch(_history_backward_kernel, grid, x, taps, dout, dx, dtail, tokens, **settings)
    shares = min(host.programs(x), rows * triton.cdiv(tokens, settings["BT"]))
    dtaps = x.new_empty((shares, *taps.shape), dtype=norm.accumulator(x.dtype))
    host.launch(_taps_backward_kernel, (shares, columns, len(taps)), x, x, tail, dout, dtaps, tokens, rows, **settings)
    return dx, dtail, dtaps.sum(0).to(taps.dtype)


@_shortconv_backward.register_fake
def _(dout, x, tail, taps):
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x, tail, taps))


def _save(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _shortconv_backward(dout, *ctx.saved_tensors)


_shortconv.register_autograd(_backward, setup_context=_save)


def shortconv(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    """`residua.ops.shortconv` on a GPU."""
    host.checked(x, tail, taps)
    if x.ndim < 2 or taps.shape[1:] != x.shape[2:] or tail.shape != (x.shape[0], len(taps) - 1, *x.shape[2:]):
        shapes = [tuple(one.shape) for one in (x, tail, taps)]
        raise Unsupported(f"x, tail and taps of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, tail.dtype), taps.dtype)
    return _shortconv(x.to(dtype), tail.to(dtype), taps)
