"""x = sum_n softmax_n(query . v_n / rms(v_n)) v_n: the depth read of AttnRes and Delta."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.attend import reference


def attend(
    query: Float[Tensor, " d"],
    sources: tuple[Float[Tensor, "b t d"], ...],
    *,
    eps: float = 1e-6,
    null: Float[Tensor, " 1"] | None = None,
    heads: int = 1,
    total: bool = False,
    centered: bool = False,
) -> Float[Tensor, "b t d"]:
    """Read a softmax mixture of the sources; their keys are the sources themselves, RMS-normalised.

    A key gain belongs in the query: `query * gain` gives the same logits. There is no 1/sqrt(d).

    query:    one per site, learned; zeros make the read the mean of the sources.
    null:     the logit of a source whose value is zero: the read may then take nothing.
    heads:    equal slices of the width, each with a softmax of its own (keys are normalised over the whole width).
    total:    weights are n * softmax: zero logits give the sum of the sources, not their mean.
    centered: weights are softmax - 1/n: zero logits give nothing.
    """
    return run(
        "attend", sources[0], reference.attend, query, sources,
        eps=eps, null=null, heads=heads, total=total, centered=centered,
    )  # fmt: skip


def attend_weights(
    query: Float[Tensor, " d"],
    sources: tuple[Float[Tensor, "b t d"], ...],
    *,
    eps: float = 1e-6,
    null: Float[Tensor, " 1"] | None = None,
    heads: int = 1,
    total: bool = False,
    centered: bool = False,
) -> Float[Tensor, "n b t heads"]:
    """The weights that `attend` gives its sources, in the accumulation type."""
    return reference.weights(query, sources, eps=eps, null=null, heads=heads, total=total, centered=centered)
