"""What the Triton kernels share: how rows are cut into blocks, how a source is found, how blocks are multiplied."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of the type to add up in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_blocks(rows: Tensor, eps: float) -> host.Settings:
    """The constants of a kernel that takes whole rows, a block of tokens a program."""
    block_width = host.power(rows.shape[-1])
    block_tokens = host.tokens_a_block(block_width)
    return {
        "WIDTH": rows.shape[-1], "EPS": eps, "ACC": accumulator(rows.dtype), "BT": block_tokens, "BD": block_width,
        "warps": host.warps(block_tokens * block_width),
    }  # fmt: skip


@triton.jit
def source(table, n, like, ALIGNED: tl.constexpr):
    """Where source n starts, typed as `like`: its address comes out of a table."""
    place = tl.load(table + n).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        # the compiler knows nothing of an address it loads; without this hint it reads one number at a time
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def head_rows(
    first, tokens, WIDTH: tl.constexpr, HEADS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr
):
    """Offsets and masks of a block of tokens: [BT, BH, BE] of the sources, [BT, BH] of their scalars, [BT]."""
    t = first + tl.arange(0, BT).to(tl.int64)
    h, e = tl.arange(0, BH), tl.arange(0, BE)
    inner = h[:, None] * (WIDTH // HEADS) + e[None, :]
    exists = (h[:, None] < HEADS) & (e[None, :] < WIDTH // HEADS)
    live = t < tokens
    at = t[:, None, None] * WIDTH + inner[None, :, :]
    scalar_at = t[:, None] * HEADS + h[None, :]
    scalar_live = live[:, None] & (h[None, :] < HEADS)
    return at, live[:, None, None] & exists[None, :, :], scalar_at, scalar_live, live


@triton.jit
def product(a, b, ACC: tl.constexpr, WIDEN: tl.constexpr):
    """The matrix product of two blocks of one type, float32 not rounded to TF32."""
    if WIDEN:
        # only for Triton's interpreter, which multiplies the bit patterns of bfloat16
        a, b = a.to(ACC), b.to(ACC)
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
