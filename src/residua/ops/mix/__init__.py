"""x = sum_n w_n v_n, with weights that are static, per channel, per token, or per token and lane."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import choice, run
from residua.ops.mix import cpu as _cpu  # noqa: F401  registers the kernel
from residua.ops.mix import linear, reference


def mix(
    weights: Float[Tensor, " n"] | Float[Tensor, "n d"] | Float[Tensor, "n b t"] | Float[Tensor, "lane n b t"],
    sources: tuple[Float[Tensor, "b t d"], ...],
) -> Float[Tensor, "*lane b t d"]:
    """The weighted sum of the sources; with a lane axis, one sum a lane in one pass."""
    if not sources:
        raise ValueError("mix needs at least one source")
    # without a kernel memory must still be linear, which the definition is not
    plain = reference.mix if choice() == "reference" else linear.mix
    return run("mix", sources[0], plain, weights, sources)
