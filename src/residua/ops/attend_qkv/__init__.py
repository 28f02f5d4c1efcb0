"""z = softmax_n(q . k_n / sqrt(e)) v_n: explicit attention over sources, one query a token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.attend_qkv import reference


def attend_qkv(
    query: Float[Tensor, "b t d"],
    keys: tuple[Float[Tensor, "b t d"], ...],
    values: tuple[Float[Tensor, "b t d"], ...],
    *,
    heads: int = 1,
) -> Float[Tensor, "b t d"]:
    """Scaled dot-product attention of each token over its own sources, `heads` slices of the width apart."""
    return run("attend_qkv", query, reference.attend, query, keys, values, heads=heads)


def attend_qkv_weights(
    query: Float[Tensor, "b t d"], keys: tuple[Float[Tensor, "b t d"], ...], *, heads: int = 1
) -> Float[Tensor, "n b t heads"]:
    """The weights that `attend_qkv` gives its values."""
    return reference.weights(query, keys, heads=heads)
