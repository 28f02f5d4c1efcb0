"""softmax(q k' / sqrt(e)) v over the tokens of whole sequences, with rotary positions: what a training step attends."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.token_attend import native as _native  # noqa: F401  registers the kernel
from residua.ops.token_attend import reference

Rotation = tuple[Float[Tensor, "t half"], Float[Tensor, "t half"]]


def token_attend(
    q: Float[Tensor, "b t qc"],
    k: Float[Tensor, "b t kc"],
    v: Float[Tensor, "b t kc"],
    rotation: Rotation | None = None,
    *,
    width: int,
    causal: bool = True,
) -> Float[Tensor, "b t qc"]:
    """Heads of `width` channels lie side by side, as projections leave them; one of k and v may serve several of q.

    rotation: cosines and sines of the positions, by which q and k are turned first.
    """
    heads, left = q.shape[-1] // width, q.shape[-1] % width  # a tracer has no divmod
    if left or q.ndim != 3 or k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[-1] % width:
        shapes = ", ".join(str(tuple(one.shape)) for one in (q, k, v))
        raise ValueError(f"token_attend takes q, k and v [b t heads * {width}], not {shapes}")
    if not k.shape[-1] or heads % (k.shape[-1] // width):
        raise ValueError(f"token_attend: {heads} heads of q are no multiple of the {k.shape[-1] // width} of k and v")
    return run("token_attend", q, reference.token_attend, q, k, v, rotation, width=width, causal=causal)
