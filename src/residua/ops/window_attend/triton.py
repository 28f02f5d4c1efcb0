"""y_t = softmax_j(q_t . k_j / sqrt(e) + b_(t-j)) v_j over the keys in the window, in Triton, linear in the sequence.

Positions are data and may come in any order, as in a ring. So every block of queries and of keys is given the least
and the greatest of its positions first; a program then passes over the run of blocks that its own can see or be seen
by, and masks inside them. For positions that ascend that run is as long as the window, however long the text.

Backward is FlashAttention's: saved are q, k, v, the output and a number a query; one kernel walks the keys of a block
of queries (dq and the bias), one the queries of a block of keys (dk, dv), all heads that share the key head included.
Nothing is added by atomics: the bias is summed by distance in each program, then over the programs. The kernels are in
`triton_device`; here they are launched. No GPU has timed this: see `residua.ops._triton`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from residua.native.guard import Unsupported
from residua.ops import _triton as host
from residua.ops._context import Context, Gradients, Inputs
from residua.ops._triton_device import accumulator
from residua.ops.window_attend import reference
from residua.ops.window_attend import triton_device as device


def _packed(x: Tensor) -> Tensor:
    """x with its last axis dense; the others are read through their strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_like(x: Tensor) -> Tensor:
    """Room for a tensor such as x, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sums_like(q: Tensor) -> Tensor:
    """Room for a number a query, in the type to add up in."""
    return torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def _bounds(positions: Tensor, size: int) -> Tensor:
    rows, count = positions.shape[:-1].numel(), positions.shape[-1]
    blocks = triton.cdiv(count, size)
    bounds = torch.empty(rows, blocks, 2, dtype=torch.int64, device=positions.device)
    host.launch(device.bounds_kernel, (blocks, rows), positions, positions, bounds, count, B=size)
    return bounds


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, queries: Tensor, keys: Tensor,
    window: int, local: bool, causal: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[int, ...], host.Settings]:  # fmt: skip
    """What every kernel takes: q, k, v and the bias; positions and their blocks' bounds; the sizes; the settings."""
    q, k, v, queries, keys = _packed(q), _packed(k), _packed(v), queries.contiguous(), keys.contiguous()
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
        "WIDEN": triton.knobs.runtime.interpret, "warps": warps,
    }  # fmt: skip
    return (q, k, v, q if bias is None else bias.contiguous()), (queries, keys, *bounds), sizes, settings


@torch.library.custom_op("residua_triton::window_attend", mutates_args=())
def _window_attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, queries: Tensor, keys: Tensor,
    window: int, local: bool, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs, places, sizes, settings = _arguments(q, k, v, bias, queries, keys, window, local, causal)
    out, lse = _dense_like(q), _sums_like(q)
    host.launch(
        device.forward_kernel, (places[2].shape[1] * q.shape[0] * q.shape[1],), q,
        *inputs, out, lse, *places, *sizes, num_stages=1 if q.dtype == torch.float64 else 2, **settings,
    )  # fmt: skip
    return out, lse


@_window_attend.register_fake
def _(q, k, v, bias, queries, keys, window, local, causal):
    return _dense_like(q), _sums_like(q)


@torch.library.custom_op("residua_triton::window_attend_backward", mutates_args=())
def _window_attend_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    queries: Tensor, keys: Tensor, window: int, local: bool, causal: bool,
) -> list[Tensor]:  # fmt: skip
    inputs, places, sizes, settings = _arguments(q, k, v, bias, queries, keys, window, local, causal)
    dout = dout.contiguous()
    dq, dk, dv = map(_dense_like, (q, k, v))
    delta = torch.empty_like(lse)
    query_blocks, key_blocks, reach = places[2].shape[1], places[3].shape[1], sizes[-1]
    dbias = torch.empty(*q.shape[:2], query_blocks, reach if bias is not None else 0, dtype=lse.dtype, device=q.device)
    host.launch(
        device.query_backward_kernel, (query_blocks * q.shape[0] * q.shape[1],), q,
        *inputs, out, lse, *places, dout, delta, dq, dbias, *sizes,
        BR=host.power(reach), num_stages=2, **settings,
    )  # fmt: skip
    host.launch(
        device.key_backward_kernel, (key_blocks * k.shape[0] * k.shape[1],), q,
        *inputs, lse, *places, dout, delta, dk, dv, *sizes, num_stages=1, **settings,
    )  # fmt: skip
    return [dq, dk, dv] + ([] if bias is None else [dbias.sum((0, 2)).to(bias.dtype)])


@_window_attend_backward.register_fake
def _(dout, out, lse, q, k, v, bias, queries, keys, window, local, causal):
    return [_dense_like(one) for one in (q, k, v, bias) if one is not None]


def _save(ctx: Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, queries, keys, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, bias, queries, keys)


def _backward(ctx: Context, dout: Tensor | None, _: Tensor | None) -> Gradients:
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
