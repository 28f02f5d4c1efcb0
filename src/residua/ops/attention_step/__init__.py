"""O attention(Q x, K x', V x'') for one new token a row over a cache: what decoding asks of a sublayer, in one call."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.attention_step import native as _native  # noqa: F401  registers the kernel
from residua.ops.attention_step import reference
from residua.ops.cached_attend import Rotation


def attention_step(
    lanes: tuple[Float[Tensor, "b 1 d"], ...],
    weights: tuple[Float[Tensor, "_ _"], ...],
    rotation: Rotation | None,
    keys: Float[Tensor, "b kv room e"],
    values: Float[Tensor, "b kv room e"],
    before: int,
) -> Float[Tensor, "b 1 c"]:
    """`cached_attend` between its projections.

    lanes:   what q, k and v are made of, or one for all.
    weights: the matrices of q, k, v and the output.
    """
    return run(
        "attention_step", lanes[0], reference.attention_step, lanes, weights, rotation, keys, values, before
    )  # fmt: skip
