"""y_t = softmax_j(q_t . k_j / sqrt(e)) v_j over 0 <= t - j < window: causal attention in a short window."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from residua.ops._backend import run
from residua.ops.window_attend import reference

Window = Literal["sliding", "local"]


def window_attend(
    q: Float[Tensor, "b head t e"],
    k: Float[Tensor, "b kv n e"],
    v: Float[Tensor, "b kv n e"],
    *,
    window: int,
    mode: Window = "sliding",
    queries: Int[Tensor, "b t"] | Int[Tensor, " t"],
    keys: Int[Tensor, "b n"] | Int[Tensor, " n"],
    causal: bool = True,
) -> Float[Tensor, "b head t e"]:
    """Attention limited to a window that counts the current token.

    queries, keys: the absolute positions of the tokens; a key position below zero is an empty cache slot.
    mode:          `sliding`: the last `window` tokens; `local`: the tokens so far of the query's own block of
                   `window` tokens. They differ: the first token of a block sees itself alone under `local`.
    causal:        False (encoder): `sliding` reaches `window - 1` tokens both ways, `local` the whole block.
    Fewer key heads than query heads are shared between groups of query heads.
    """
    return run(
        "window_attend", q, reference.window_attend, q, k, v,
        window=window, mode=mode, queries=queries, keys=keys, causal=causal,
    )  # fmt: skip
