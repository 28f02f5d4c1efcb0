"""x = sum_n w_n v_n, with weights that are static, per channel, per token, or per token and lane."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.mix import reference


def mix(
    weights: Float[Tensor, " n"] | Float[Tensor, "n d"] | Float[Tensor, "n b t"] | Float[Tensor, "lane n b t"],
    sources: tuple[Float[Tensor, "b t d"], ...],
) -> Float[Tensor, "*lane b t d"]:
    """The weighted sum of the sources; with a lane axis, one sum a lane in one pass."""
    return run("mix", sources[0], reference.mix, weights, sources)
