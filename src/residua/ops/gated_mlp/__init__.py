"""down(silu(gate x) * up x): a SwiGLU MLP, in one call where tokens are few."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.gated_mlp import native as _native  # noqa: F401  registers the kernel
from residua.ops.gated_mlp import reference


def gated_mlp(
    x: Float[Tensor, "*n d"], gate: Float[Tensor, "h d"], up: Float[Tensor, "h d"], down: Float[Tensor, "c h"]
) -> Float[Tensor, "*n c"]:
    """By the three matrices."""
    return run("gated_mlp", x, reference.gated_mlp, x, gate, up, down)
