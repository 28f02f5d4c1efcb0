"""x_t = sum_n r_n v_n over one pass of the sources, r = a softmax(q . v_n rstd_n) - c: the depth read in Triton.

Forward: one program a block of tokens, whole rows in registers, softmax online: every source is read once. A row is
laid out [heads, width / heads], so that the heads' softmaxes need no second pass.

Backward saves the inputs and the softmax's greatest logit and mass, two numbers a token and head, and reads the
sources twice, the second time mostly from L2: with g_n = <dx, v_n> and p the softmax,

    delta = sum_n p_n g_n,   dl_n = a p_n (g_n - delta)
    dv_n  = r_n dx + rstd_n dl_n q - rstd_n^3 / d (sum_heads dl_n <q, v_n>) v_n
    dq    = sum_tokens sum_n rstd_n dl_n v_n,   dnull = -a sum_tokens p_null delta

delta is not taken from the saved output, as FlashAttention does, because the output is rounded to bfloat16 and g_n
and delta nearly cancel where sources are alike. Nor are the two numbers one log-sum: rounded, it would keep the p_n
from adding up to 1, which about doubles the error of dq and dnull in float32.

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
from residua.ops._context import Context, Gradients, Inputs
from residua.ops._triton_device import accumulator, head_rows, source
from residua.ops._triton_table import addresses
from residua.ops.attend.reference import added


@triton.jit
def logits_of(v, q, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / rms(v) of each token, and q . v of each head."""
    # [BT], [BT, BH]
    rstd = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / WIDTH + EPS)
    return rstd, tl.sum(v * q[None, :, :], 2)


@triton.jit
def forward_kernel(
    table, like, query, null, gain, out, sums, count, tokens,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, NULL: tl.constexpr, TOTAL: tl.constexpr,
    CENTERED: tl.constexpr, NORM: tl.constexpr, NORM_EPS: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BT
    at, mask, scalar_at, scalar_live, _ = head_rows(first, tokens, WIDTH, HEADS, BT, BH, BE)
    h, e = tl.arange(0, BH), tl.arange(0, BE)
    exists = (h[:, None] < HEADS) & (e[None, :] < WIDTH // HEADS)
    # [BH, BE]
    q = tl.load(query + h[:, None] * (WIDTH // HEADS) + e[None, :], mask=exists, other=0.0).to(ACC)
    # [BT, BH]
    top = tl.full([BT, BH], float("-inf"), ACC)
    mass = tl.zeros([BT, BH], ACC)
    if NULL:
        top = tl.zeros([BT, BH], ACC) + tl.load(null).to(ACC)
        mass = tl.full([BT, BH], 1.0, ACC)
    # [BT, BH, BE]
    mixed = tl.zeros([BT, BH, BE], ACC)
    plain = tl.zeros([BT, BH, BE], ACC)
    for n in range(count):
        v = tl.load(source(table, n, like, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        rstd, dot = logits_of(v, q, WIDTH, EPS)
        logit = dot * rstd[:, None]
        peak = tl.maximum(top, logit)
        decay, weight = tl.exp(top - peak), tl.exp(logit - peak)
        mass = mass * decay + weight
        mixed = mixed * decay[:, :, None] + weight[:, :, None] * v
        if CENTERED:
            plain += v
        top = peak
    mixed = mixed / mass[:, :, None]
    if TOTAL:
        mixed = mixed * count
    if CENTERED:
        mixed = mixed - plain / count
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(mixed * mixed, 2), 1) / WIDTH + NORM_EPS)
        gains = tl.load(gain + h[:, None] * (WIDTH // HEADS) + e[None, :], mask=exists, other=0.0).to(ACC)
        mixed = mixed * scale[:, None, None] * gains[None, :, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(sums + 2 * scalar_at, top, mask=scalar_live)
    tl.store(sums + 2 * scalar_at + 1, 1 / mass, mask=scalar_live)


@triton.jit
def backward_kernel(
    table, gradients, like, query, null, sums, dout, dquery, dnull, count, tokens,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, NULL: tl.constexpr, TOTAL: tl.constexpr,
    CENTERED: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h, e = tl.arange(0, BH), tl.arange(0, BE)
    exists = (h[:, None] < HEADS) & (e[None, :] < WIDTH // HEADS)
    inner = h[:, None] * (WIDTH // HEADS) + e[None, :]
    # [BH, BE]
    q = tl.load(query + inner, mask=exists, other=0.0).to(ACC)
    sum_query = tl.zeros([BH, BE], ACC)
    # [BT, BH]
    sum_null = tl.zeros([BT, BH], ACC)
    scale = tl.full([BT, BH], 1.0, ACC)
    center = tl.zeros([BT, BH], ACC)
    if TOTAL:
        scale = scale * count
    if CENTERED:
        center = tl.full([BT, BH], 1.0, ACC) / count
    for block in range(program, tl.cdiv(tokens, BT), tl.num_programs(0)):
        at, mask, scalar_at, scalar_live, live = head_rows(block * BT, tokens, WIDTH, HEADS, BT, BH, BE)
        # [BT, BH, BE]
        dx = tl.load(dout + at, mask=mask, other=0.0).to(ACC)
        # [BT, BH]
        top = tl.load(sums + 2 * scalar_at, mask=scalar_live, other=0.0)
        share = tl.load(sums + 2 * scalar_at + 1, mask=scalar_live, other=0.0)
        delta = tl.zeros([BT, BH], ACC)
        for n in range(count):
            v = tl.load(source(table, n, like, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
            rstd, dot = logits_of(v, q, WIDTH, EPS)
            delta += tl.exp(dot * rstd[:, None] - top) * share * tl.sum(dx * v, 2)
        for n in range(count):
            v = tl.load(source(table, n, like, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
            rstd, dot = logits_of(v, q, WIDTH, EPS)
            p = tl.exp(dot * rstd[:, None] - top) * share
            dlogit = tl.where(scalar_live, scale * p * (tl.sum(dx * v, 2) - delta), 0.0)
            # [BT, BH, BE]
            step = tl.where(live, rstd, 0.0)[:, None] * dlogit
            sum_query += tl.sum(step[:, :, None] * v, 0)
            place = source(gradients, n, like, ALIGNED)
            if tl.load(gradients + n) != 0:
                turn = tl.sum(step * dot, 1) * rstd * rstd / WIDTH
                dv = (scale * p - center)[:, :, None] * dx + step[:, :, None] * q[None, :, :] - turn[:, None, None] * v
                tl.store(place + at, dv.to(like.dtype.element_ty), mask=mask)
        if NULL:
            sum_null -= tl.where(scalar_live, scale * tl.exp(tl.load(null).to(ACC) - top) * share * delta, 0.0)
    tl.store(dquery + program.to(tl.int64) * WIDTH + inner, sum_query, mask=exists)
    if NULL:
        tl.store(dnull + program, tl.sum(tl.sum(sum_null, 1), 0))


def settings_of(like: Tensor, eps: float, heads: int) -> host.Settings:
    """The constants of a kernel whose blocks are [tokens, heads, width / heads]."""
    width = like.shape[-1]
    block_heads, block_width = host.power(heads), host.power(width // heads)
    block_tokens = host.tokens_a_block(block_heads * block_width)
    return {
        "WIDTH": width, "HEADS": heads, "EPS": eps, "ACC": accumulator(like.dtype),
        "BT": block_tokens, "BH": block_heads, "BE": block_width,
        "warps": host.warps(block_tokens * block_heads * block_width),
    }  # fmt: skip


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


@torch.library.custom_op("residua_triton::attend", mutates_args=())
def _attend(
    query: Tensor, sources: list[Tensor], null: Tensor | None, dtype: torch.dtype,
    eps: float, heads: int, total: bool, centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sources = [one.contiguous() for one in sources]
    like, width = sources[0], sources[0].shape[-1]
    tokens = like.numel() // width
    settings = settings_of(like, eps, heads) | {"NULL": null is not None, "TOTAL": total, "CENTERED": centered}
    out = torch.empty_like(like, dtype=dtype)
    sums = torch.empty(*like.shape[:-1], heads, 2, dtype=_wide(like), device=like.device)
    host.launch(
        forward_kernel, (triton.cdiv(tokens, settings["BT"]),), like,
        addresses(sources, like), like, query.contiguous(), null, None, out, sums, len(sources), tokens,
        NORM=False, NORM_EPS=0.0, ALIGNED=host.aligned(sources, width), **settings,
    )  # fmt: skip
    return out, sums


@_attend.register_fake
def _(query, sources, null, dtype, eps, heads, total, centered):
    like = sources[0]
    out = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return out, like.new_empty((*like.shape[:-1], heads, 2), dtype=_wide(like))


@torch.library.custom_op("residua_triton::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, sums: Tensor, query: Tensor, sources: list[Tensor], null: Tensor | None, wanted: list[bool],
    eps: float, heads: int, total: bool, centered: bool,
) -> list[Tensor]:  # fmt: skip
    sources = [one.contiguous() for one in sources]
    like, width = sources[0], sources[0].shape[-1]
    tokens = like.numel() // width
    settings = settings_of(like, eps, heads) | {"NULL": null is not None, "TOTAL": total, "CENTERED": centered}
    if heads > 1 or centered:  # more numbers a row, which more threads must hold
        settings["warps"] = min(16, 2 * settings["warps"])
    grid = min(host.programs(like), triton.cdiv(tokens, settings["BT"]))
    gradients = [torch.empty_like(one) if want else None for one, want in zip(sources, wanted, strict=True)]
    dquery = torch.empty(grid, width, dtype=sums.dtype, device=like.device)
    dnull = torch.empty(grid, dtype=sums.dtype, device=like.device)
    host.launch(
        backward_kernel, (grid,), like,
        addresses(sources, like), addresses(gradients, like), like, query.contiguous(), null, sums,
        dout.contiguous(), dquery, dnull, len(sources), tokens,
        ALIGNED=host.aligned([*sources, *gradients], width), **settings,
    )  # fmt: skip
    shares = [dquery.sum(0).to(query.dtype)]
    if null is not None:
        shares.append(dnull.sum().to(null.dtype).expand(null.shape).clone())
    return [*shares, *(one for one in gradients if one is not None)]


@_attend_backward.register_fake
def _(dout, sums, query, sources, null, wanted, eps, heads, total, centered):
    shares = [torch.empty_like(query)] + ([] if null is None else [torch.empty_like(null)])
    contiguous = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in sources]
    return [*shares, *(one for one, want in zip(contiguous, wanted, strict=True) if want)]


def _save(ctx: Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, sources, null, _, *ctx.options = inputs
    ctx.count, ctx.null = len(sources), null is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, output[1], *sources, *([null] if null is not None else []))


def _backward(ctx: Context, dout: Tensor | None, _: Tensor | None) -> Gradients:
    if dout is None:
        return (None,) * 8
    query, sums, *rest = ctx.saved_tensors
    sources, null = rest[: ctx.count], rest[ctx.count] if ctx.null else None
    wanted = list(ctx.needs_input_grad[1])
    shares = iter(_attend_backward(dout, sums, query, sources, null, wanted, *ctx.options))
    dquery = next(shares)
    dnull = next(shares) if ctx.null else None
    return dquery, [next(shares) if want else None for want in wanted], dnull, *(None,) * 5


_attend.register_autograd(_backward, setup_context=_save)


def check(query: Tensor, sources: tuple[Tensor, ...], null: Tensor | None, heads: int) -> None:
    """Decline a read that the kernels do not make."""
    host.checked(query, *sources, *([] if null is None else [null]))
    if sources[0].shape[-1] % heads:
        raise Unsupported(f"a width of {sources[0].shape[-1]} in {heads} heads")
    if null is not None and null.numel() != 1:
        raise Unsupported("more than one null logit")


def attend(
    query: Tensor, sources: tuple[Tensor, ...], *,
    eps: float, null: Tensor | None, heads: int, total: bool, centered: bool, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`residua.ops.attend` on a GPU."""
    check(query, sources, null, heads)
    dtype = sources[0].dtype
    out, _ = _attend(query, list(host.alike(sources)), null, dtype, eps, heads, total, centered)
    return added(onto, out)
