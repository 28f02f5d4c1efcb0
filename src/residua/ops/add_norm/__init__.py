"""h, y -> (h + y, gain (h + y) / rms(h + y)): what a sublayer wrote, added, and normed for the next."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.add_norm import native as _native  # noqa: F401  registers the kernel
from residua.ops.add_norm import reference


def add_norm(
    h: Float[Tensor, "*n d"], y: Float[Tensor, "*n d"], gain: Float[Tensor, " d"] | None = None, *, eps: float
) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n d"]]:
    """The sum and its RMS norm, in one pass over memory; `gain` scales the norm's channels."""
    return run("add_norm", h, reference.add_norm, h, y, gain, eps=eps)
