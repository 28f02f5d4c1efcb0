"""gain x / rms(x), x a depth read: the read and the norm after it, in one pass where a kernel has both.

Inference engines fuse the two, so that the read itself is never written. A backward pass wants the read: where
gradients are asked for, it is made by the kernels of `attend`, and the norm is torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from residua.native.guard import Unsupported, forward_mode
from residua.ops._backend import choice, registered


def attend_norm(
    attend: Callable[..., Tensor],
    query: Float[Tensor, " d"],
    sources: tuple[Float[Tensor, "b t d"], ...],
    gain: Float[Tensor, " d"],
    *,
    norm_eps: float,
    eps: float,
    null: Float[Tensor, " 1"] | None,
    heads: int,
    total: bool,
    centered: bool,
) -> Float[Tensor, "b t d"]:
    """The fused kernel where there is one, else `attend` and the norm."""
    found = registered("attend_norm", sources[0].device.type)
    graded = torch.is_grad_enabled() and any(
        one.requires_grad for one in (query, gain, *sources, *(() if null is None else (null,)))
    )
    options = {"eps": eps, "null": null, "heads": heads, "total": total, "centered": centered}
    if found is not None and choice() in ("auto", found[0]) and not graded and not forward_mode():
        try:
            fused: Tensor = found[1](query, sources, gain, norm_eps=norm_eps, **options)
            return fused
        except Unsupported:  # the read says what is the matter
            pass
    read = attend(query, sources, **options)
    return F.rms_norm(read, read.shape[-1:], gain.to(read.dtype), norm_eps)
