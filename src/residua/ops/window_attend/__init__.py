"""y_i = softmax_j(q_i . k_j / sqrt(e) + b_(i-j)) v_j over 0 <= i - j < window: attention in a short causal window.

The one operator of both axes. `axis` is the ordered axis that it attends along, and every other axis is a batch: the
tokens of [b t d] are axis 1, the depth of a stack of layers [l b t d] is axis 0. A depth read has one query at a time
and sources that are not stacked: `attend_qkv` is its fused form for projected queries (`depthswa`), `attend` for a
static query and normalised sources as keys (`attnres`, `delta`). `residua duality` shows both equal to this.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from residua.ops._backend import run
from residua.ops.window_attend import chunked as chunked  # registers itself
from residua.ops.window_attend import reference
from residua.ops.window_attend.position import rotate, rotations

Window = Literal["sliding", "local"]


def window_attend(
    q: Float[Tensor, "..."],
    k: Float[Tensor, "..."],
    v: Float[Tensor, "..."],
    *,
    window: int,
    mode: Window = "sliding",
    axis: int = -2,
    heads: int | None = None,
    queries: Int[Tensor, "b t"] | Int[Tensor, " t"] | None = None,
    keys: Int[Tensor, "b n"] | Int[Tensor, " n"] | None = None,
    causal: bool = True,
    bias: Float[Tensor, "head reach"] | None = None,
    rotary: float | None = None,
) -> Float[Tensor, "..."]:
    """Attention along `axis`, limited to a window that counts the current index.

    q, k, v: [b head t e], or with `heads` any tensors whose last axis is that many heads side by side. Fewer key heads
             than query heads are shared between groups of query heads.
    axis:    the one that is attended along.
    keys:    the positions of the keys, 0, 1, 2, ... by default; below zero is padding or an empty slot, which sees
             nothing and is not seen. Positions `window` or more apart never meet: `position.apart` uses that to keep
             packed documents apart.
    queries: the positions of the queries. By default they are the last of the keys, and positions must then ascend
             along the axis (padding aside); with positions given the keys may stand in any order, as in a ring.
    mode:    `sliding`: the last `window`; `local`: those so far of the query's own block of `window`. They differ: the
             first of a block sees itself alone under `local`.
    causal:  False (encoder): `sliding` reaches `window - 1` both ways, `local` the whole block.
    bias:    added to the logits by distance i - j from 0 to window - 1 (from 1 - window where not causal).
    rotary:  rotates queries and keys by their positions, with frequencies of this base.
    A query that sees nothing reads zeros.
    """
    if window < 1:
        raise ValueError(f"window_attend: window={window} must be at least 1: it counts the current index")
    shape = q.movedim(axis, -2).shape
    q, k, v = (_split(x, axis, heads, q.shape[-1]) for x in (q, k, v))
    if bias is not None and bias.shape != (q.shape[1], window if causal else 2 * window - 1):
        raise ValueError(
            f"window_attend: bias has shape {tuple(bias.shape)}; {q.shape[1]} heads and window={window} need "
            f"({q.shape[1]}, {window if causal else 2 * window - 1})"
        )
    if rotary is not None:
        at = reference.default_positions(q, k, queries, keys)
        q, k = (rotate(x, *rotations(p, x.shape[-1], rotary, x.dtype)) for x, p in zip((q, k), at, strict=True))
    y: Tensor = run(
        "window_attend", q, reference.window_attend, q, k, v,
        window=window, mode=mode, queries=queries, keys=keys, causal=causal, bias=bias,
    )  # fmt: skip
    if heads is not None:
        y = y.transpose(1, 2).flatten(-2)
    return y.reshape(shape).movedim(-2, axis)


def _split(x: Tensor, axis: int, heads: int | None, width: int) -> Tensor:
    """[b head t e], the attended axis third and everything before it in one batch."""
    x = x.movedim(axis, -2)
    if heads is None:
        return x if x.ndim == 4 else x.flatten(0, -4)
    if width % heads:
        raise ValueError(f"window_attend: {heads} heads do not divide the width {width}")
    x = x.flatten(0, -3) if x.ndim > 3 else x.reshape(-1, *x.shape[-2:])
    return x.unflatten(-1, (-1, width // heads)).transpose(1, 2)
