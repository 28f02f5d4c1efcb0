"""A depth read and its RMS norm in one kernel, without gradients: the forward kernel of `triton` with its norm on.

No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from residua.native.guard import Unsupported
from residua.ops import _triton as host
from residua.ops import norm
from residua.ops._triton_table import addresses
from residua.ops.attend.triton import check, forward_kernel, settings_of


@torch.library.custom_op("residua_triton::attend_norm", mutates_args=())
def _attend_norm(
    query: Tensor, sources: list[Tensor], null: Tensor | None, gain: Tensor, dtype: torch.dtype,
    norm_eps: float, eps: float, heads: int, total: bool, centered: bool,
) -> Tensor:  # fmt: skip
    sources = [one.contiguous() for one in sources]
    like, width = sources[0], sources[0].shape[-1]
    tokens = like.numel() // width
    settings = settings_of(like, eps, heads) | {"NULL": null is not None, "TOTAL": total, "CENTERED": centered}
    out = torch.empty_like(like, dtype=dtype)
    sums = like.new_empty((*like.shape[:-1], heads, 2), dtype=norm.accumulator(like.dtype))
    host.launch(
        forward_kernel, (triton.cdiv(tokens, settings["BT"]),), like,
        addresses(sources, like), like, query.contiguous(), null, gain.contiguous(), out, sums, len(sources), tokens,
        NORM=True, NORM_EPS=norm_eps, ALIGNED=host.aligned(sources, width), **settings,
    )  # fmt: skip
    return out


@_attend_norm.register_fake
def _(query, sources, null, gain, dtype, norm_eps, eps, heads, total, centered):
    return torch.empty_like(sources[0], dtype=dtype, memory_format=torch.contiguous_format)


def attend_norm(
    query: Tensor, sources: tuple[Tensor, ...], gain: Tensor, *,
    norm_eps: float, eps: float, null: Tensor | None, heads: int, total: bool, centered: bool,
) -> Tensor:  # fmt: skip
    """`residua.ops.attend_norm` on a GPU."""
    check(query, sources, null, heads)
    if gain.shape != query.shape:
        raise Unsupported(f"a gain of shape {tuple(gain.shape)}")
    dtype = sources[0].dtype
    return _attend_norm(query, list(host.alike(sources)), null, gain, dtype, norm_eps, eps, heads, total, centered)
