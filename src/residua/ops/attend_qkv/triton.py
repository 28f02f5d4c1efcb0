"""z_t = sum_n softmax_n(q_t . k_nt / sqrt(e)) v_nt: attention of every token over its own sources, in Triton.

One program a block of tokens, rows laid out [heads, width / heads], softmax online: keys and values are read once.
Backward saves the inputs and two numbers a token and head, the softmax's greatest logit and its mass, and reads the
sources twice; with g_n = <dz, v_n> and s = 1 / sqrt(e),

    delta = sum_n p_n g_n    dl_n = p_n (g_n - delta)    dv_n = p_n dz    dk_n = s dl_n q    dq = s sum_n dl_n k_n

No GPU has timed this: see `residua.ops._triton`.
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
from residua.ops._context import Context, Gradients, Inputs
from residua.ops._triton_device import accumulator, head_rows, source
from residua.ops._triton_table import addresses


@triton.jit
def _forward_kernel(
    keys, values, like_key, like_value, query, out, sums, count, tokens,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BT
    at, mask, scalar_at, scalar_live, _ = head_rows(first, tokens, WIDTH, HEADS, BT, BH, BE)
    # [BT, BH, BE]
    q = tl.load(query + at, mask=mask, other=0.0).to(ACC) * SCALE
    mixed = tl.zeros([BT, BH, BE], ACC)
    # [BT, BH]
    top = tl.full([BT, BH], float("-inf"), ACC)
    mass = tl.zeros([BT, BH], ACC)
    for n in range(count):
        k = tl.load(source(keys, n, like_key, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(source(values, n, like_value, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        logit = tl.sum(q * k, 2)
        peak = tl.maximum(top, logit)
        decay, weight = tl.exp(top - peak), tl.exp(logit - peak)
        mass = mass * decay + weight
        mixed = mixed * decay[:, :, None] + weight[:, :, None] * v
        top = peak
    tl.store(out + at, (mixed / mass[:, :, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(sums + 2 * scalar_at, top, mask=scalar_live)
    tl.store(sums + 2 * scalar_at + 1, 1 / mass, mask=scalar_live)


@triton.jit
def _backward_kernel(
    keys, values, dkeys, dvalues, like_key, like_value, query, sums, dout, dquery, count, tokens,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BT
    at, mask, scalar_at, scalar_live, _ = head_rows(first, tokens, WIDTH, HEADS, BT, BH, BE)
    # [BT, BH, BE]
    q = tl.load(query + at, mask=mask, other=0.0).to(ACC) * SCALE
    dz = tl.load(dout + at, mask=mask, other=0.0).to(ACC)
    dq = tl.zeros([BT, BH, BE], ACC)
    # [BT, BH]
    top = tl.load(sums + 2 * scalar_at, mask=scalar_live, other=0.0)
    share = tl.load(sums + 2 * scalar_at + 1, mask=scalar_live, other=0.0)
    delta = tl.zeros([BT, BH], ACC)
    for n in range(count):
        k = tl.load(source(keys, n, like_key, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(source(values, n, like_value, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        delta += tl.exp(tl.sum(q * k, 2) - top) * share * tl.sum(dz * v, 2)
    for n in range(count):
        k = tl.load(source(keys, n, like_key, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(source(values, n, like_value, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        p = tl.exp(tl.sum(q * k, 2) - top) * share
        dlogit = p * (tl.sum(dz * v, 2) - delta)
        dq += dlogit[:, :, None] * k
        if tl.load(dkeys + n) != 0:
            dk = (dlogit[:, :, None] * q).to(like_key.dtype.element_ty)
            tl.store(source(dkeys, n, like_key, ALIGNED) + at, dk, mask=mask)
        if tl.load(dvalues + n) != 0:
            dv = (p[:, :, None] * dz).to(like_value.dtype.element_ty)
            tl.store(source(dvalues, n, like_value, ALIGNED) + at, dv, mask=mask)
    tl.store(dquery + at, (dq * SCALE).to(dquery.dtype.element_ty), mask=mask)


def _settings(query: Tensor, heads: int) -> host.Settings:
    width = query.shape[-1]
    block_heads, block_width = host.power(heads), host.power(width // heads)
    block_tokens = host.tokens_a_block(block_heads * block_width)
    return {
        "WIDTH": width, "HEADS": heads, "SCALE": (width // heads) ** -0.5, "ACC": accumulator(query.dtype),
        "BT": block_tokens, "BH": block_heads, "BE": block_width,
        "warps": host.warps(block_tokens * block_heads * block_width),
    }  # fmt: skip


@torch.library.custom_op("residua_triton::attend_qkv", mutates_args=())
def _attend_qkv(query: Tensor, keys: list[Tensor], values: list[Tensor], heads: int) -> tuple[Tensor, Tensor]:
    query, keys, values = query.contiguous(), *([one.contiguous() for one in many] for many in (keys, values))
    settings, tokens = _settings(query, heads), query.numel() // query.shape[-1]
    out = torch.empty_like(query)
    sums = query.new_empty((*query.shape[:-1], heads, 2), dtype=norm.accumulator(query.dtype))
    host.launch(
        _forward_kernel, (triton.cdiv(tokens, settings["BT"]),), query,
        addresses(keys, query), addresses(values, query), keys[0], values[0], query, out, sums, len(keys), tokens,
        ALIGNED=host.aligned([*keys, *values], query.shape[-1]), **settings,
    )  # fmt: skip
    return out, sums


@_attend_qkv.register_fake
def _(query, keys, values, heads):
    sums = query.new_empty((*query.shape[:-1], heads, 2), dtype=norm.accumulator(query.dtype))
    return torch.empty_like(query, memory_format=torch.contiguous_format), sums


@torch.library.custom_op("residua_triton::attend_qkv_backward", mutates_args=())
def _attend_qkv_backward(
    dout: Tensor, sums: Tensor, query: Tensor, keys: list[Tensor], values: list[Tensor], wanted: list[bool], heads: int
) -> list[Tensor]:
    """Gradients of the query and of the wanted keys and values."""
    query, keys, values = query.contiguous(), *([one.contiguous() for one in many] for many in (keys, values))
    settings, tokens, count = _settings(query, heads), query.numel() // query.shape[-1], len(keys)
    dquery = torch.empty_like(query)
    made = [torch.empty_like(one) if want else None for one, want in zip([*keys, *values], wanted, strict=True)]
    host.launch(
        _backward_kernel, (triton.cdiv(tokens, settings["BT"]),), query,
        *(addresses(many, query) for many in (keys, values, made[:count], made[count:])), keys[0], values[0],
        query, sums, dout.contiguous(), dquery, count, tokens,
        ALIGNED=host.aligned([*keys, *values, *made], query.shape[-1]), **settings,
    )  # fmt: skip
    return [dquery, *(one for one in made if one is not None)]


@_attend_qkv_backward.register_fake
def _(dout, sums, query, keys, values, wanted, heads):
    asked = [one for one, want in zip([query, *keys, *values], [True, *wanted], strict=True) if want]
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in asked]


def _save(ctx: Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, ctx.heads = inputs
    ctx.count = len(keys)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, output[1], *keys, *values)


def _backward(ctx: Context, dout: Tensor | None, _: Tensor | None) -> Gradients:
    if dout is None:
        return (None,) * 4
    query, sums, *rest = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[1], *ctx.needs_input_grad[2]]
    keys, values = rest[: ctx.count], rest[ctx.count :]
    dquery, *made = _attend_qkv_backward(dout, sums, query, keys, values, wanted, ctx.heads)
    found = iter(made)
    gradients = [next(found) if want else None for want in wanted]
    return dquery, gradients[: ctx.count], gradients[ctx.count :], None


_attend_qkv.register_autograd(_backward, setup_context=_save)


def attend_qkv(query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], *, heads: int) -> Tensor:
    """`residua.ops.attend_qkv` on a GPU."""
    host.checked(query, *keys, *values)
    if query.shape[-1] % heads:
        raise Unsupported(f"a width of {query.shape[-1]} in {heads} heads")
    if any(one.shape != query.shape for one in (*keys, *values)):
        raise Unsupported(f"keys or values that are not of the query's shape, {tuple(query.shape)}")
    out, _ = _attend_qkv(query, list(host.alike(keys)), list(host.alike(values)), heads)
    return out
