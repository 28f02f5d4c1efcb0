"""x = sum_n softmax_n(query . v_n / rms(v_n)) v_n: the depth read of AttnRes and Delta."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import choice, run
from residua.ops.attend import linear, normed, reference
from residua.ops.attend.cpu import CARRIED as CARRIED
from residua.ops.attend.native import Carry as Carry
from residua.ops.attend.phases import ahead as ahead
from residua.ops.attend.phases import carries as carries
from residua.ops.attend.phases import groupable as groupable
from residua.ops.attend.phases import merge as merge
from residua.ops.attend.phases import together as together


def attend(
    query: Float[Tensor, " d"],
    sources: tuple[Float[Tensor, "b t d"], ...],
    *,
    eps: float = 1e-6,
    null: Float[Tensor, " 1"] | None = None,
    heads: int = 1,
    total: bool = False,
    centered: bool = False,
    onto: Float[Tensor, "b t d"] | None = None,
) -> Float[Tensor, "b t d"]:
    """Read a softmax mixture of the sources; their keys are the sources themselves, RMS-normalised.

    A key gain belongs in the query: `query * gain` gives the same logits. There is no 1/sqrt(d).

    query:    one per site, learned; zeros make the read the mean of the sources.
    null:     the logit of a source whose value is zero: the read may then take nothing.
    heads:    equal slices of the width, each with a softmax of its own (keys are normalised over the whole width).
    total:    weights are n * softmax: zero logits give the sum of the sources, not their mean.
    centered: weights are softmax - 1/n: zero logits give nothing.
    onto:     what the read is added to. The sum is returned, and the kernels keep nothing of the read's size.
    """
    _refuse(sources)
    # without a kernel memory must still be linear, which the definition is not
    plain = reference.attend if choice() == "reference" else linear.attend
    return run(
        "attend", sources[0], plain, query, sources,
        eps=eps, null=null, heads=heads, total=total, centered=centered, onto=onto,
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
    _refuse(sources)
    return run(
        "attend_weights", sources[0], reference.weights, query, sources,
        eps=eps, null=null, heads=heads, total=total, centered=centered,
    )  # fmt: skip


def attend_norm(
    query: Float[Tensor, " d"],
    sources: tuple[Float[Tensor, "b t d"], ...],
    gain: Float[Tensor, " d"],
    *,
    norm_eps: float,
    eps: float = 1e-6,
    null: Float[Tensor, " 1"] | None = None,
    heads: int = 1,
    total: bool = False,
    centered: bool = False,
) -> Float[Tensor, "b t d"]:
    """gain x / sqrt(mean(x^2) + norm_eps) of the read x = attend(query, sources): one pass on a GPU, in inference."""
    _refuse(sources)
    return normed.attend_norm(
        attend, query, sources, gain,
        norm_eps=norm_eps, eps=eps, null=null, heads=heads, total=total, centered=centered,
    )  # fmt: skip


def _refuse(sources: tuple[Tensor, ...]) -> None:
    if not sources:
        raise ValueError("attend needs at least one source")
