"""The weights of a depth read on a GPU: logits in one pass over the sources, in Triton; their softmax is torch's.

No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops import _triton as host
from residua.ops import norm
from residua.ops._triton_device import head_rows, source
from residua.ops._triton_table import addresses
from residua.ops.attend import reference
from residua.ops.attend.triton import check, logits_of, settings_of


@triton.jit
def _logits_kernel(
    table, like, query, logits, count, tokens,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BT
    at, mask, scalar_at, scalar_live, _ = head_rows(first, tokens, WIDTH, HEADS, BT, BH, BE)
    h, e = tl.arange(0, BH), tl.arange(0, BE)
    exists = (h[:, None] < HEADS) & (e[None, :] < WIDTH // HEADS)
    q = tl.load(query + h[:, None] * (WIDTH // HEADS) + e[None, :], mask=exists, other=0.0).to(ACC)
    into = logits + scalar_at
    for n in range(count):
        v = tl.load(source(table, n, like, ALIGNED) + at, mask=mask, other=0.0).to(ACC)
        rstd, dot = logits_of(v, q, WIDTH, EPS)
        tl.store(into, dot * rstd[:, None], mask=scalar_live)
        into += tokens * HEADS


@torch.library.custom_op("residua_triton::attend_logits", mutates_args=())
def _attend_logits(query: Tensor, sources: list[Tensor], eps: float, heads: int) -> Tensor:
    sources = [one.contiguous() for one in sources]
    like, width = sources[0], sources[0].shape[-1]
    tokens = like.numel() // width
    settings = settings_of(like, eps, heads)
    found = like.new_empty((len(sources), *like.shape[:-1], heads), dtype=norm.accumulator(like.dtype))
    host.launch(
        _logits_kernel, (triton.cdiv(tokens, settings["BT"]),), like,
        addresses(sources, like), like, query.contiguous(), found, len(sources), tokens,
        ALIGNED=host.aligned(sources, width), **settings,
    )  # fmt: skip
    return found


@_attend_logits.register_fake
def _(query, sources, eps, heads):
    like = sources[0]
    return like.new_empty((len(sources), *like.shape[:-1], heads), dtype=norm.accumulator(like.dtype))


def attend_weights(
    query: Tensor, sources: tuple[Tensor, ...], *,
    eps: float, null: Tensor | None, heads: int, total: bool, centered: bool,
) -> Tensor:  # fmt: skip
    """`residua.ops.attend_weights` on a GPU; where a gradient of the weights is wanted, by the reference."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in (query, *sources)):
        return reference.weights(query, sources, eps=eps, null=null, heads=heads, total=total, centered=centered)
    check(query, sources, null, heads)
    logits = _attend_logits(query, list(host.alike(sources)), eps, heads)
    if null is not None:
        logits = torch.cat([null.to(logits.dtype).expand_as(logits[:1]), logits])
    found = logits.softmax(0)[-len(sources) :]
    if total:
        found = found * len(sources)
    return found - 1 / len(sources) if centered else found
