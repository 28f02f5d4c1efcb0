"""softmax(q k' / sqrt(e)) v for one new token a row, over a cache that takes its key and value in: decoding."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from residua.ops._backend import run
from residua.ops.cached_attend import native as _native  # noqa: F401  registers the kernel
from residua.ops.cached_attend import reference

Rotation = tuple[Float[Tensor, "1 half"], Float[Tensor, "1 half"]]


def cached_attend(
    q: Float[Tensor, "b 1 qc"],
    k: Float[Tensor, "b 1 kc"],
    v: Float[Tensor, "b 1 kc"],
    rotation: Rotation | None,
    keys: Float[Tensor, "b kv room e"],
    values: Float[Tensor, "b kv room e"],
    before: int,
) -> Float[Tensor, "b 1 qc"]:
    """What the token reads. Heads lie side by side, as projections leave them; one of k and v may serve several of q.

    rotation:     cosines and sines of the token's position, by which q and k are turned first.
    keys, values: the cache, whose first `before` places are taken; the next is written here.
    """
    rows, shared, room, width = keys.shape
    if k.shape != v.shape or k.shape != (rows, 1, shared * width) or q.shape[:2] != k.shape[:2] or not k.numel():
        shapes = ", ".join(str(tuple(one.shape)) for one in (q, k, v, keys))
        raise ValueError(f"cached_attend takes q, k and v [b 1 heads * e] and a cache [b heads room e], not {shapes}")
    if q.shape[-1] % k.shape[-1]:
        raise ValueError(
            f"cached_attend: {q.shape[-1] / width:g} heads of q are no multiple of the {shared} of k and v"
        )
    if not 0 <= before < room or values.shape != keys.shape:
        raise ValueError(f"cached_attend: a cache with room for {room} tokens has none at {before}")
    return run("cached_attend", q, reference.cached_attend, q, k, v, rotation, keys, values, before)
