"""The definition of `remix`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops.norm import accumulator


def remix(weights: Tensor, H: Tensor, *, onto: Tensor | None = None, read: Tensor | None = None) -> Any:
    """One einsum over the streams; with a read, both."""
    if read is not None:
        return remix(read[..., None], H).squeeze(-2), remix(weights, H)
    wide = accumulator(H.dtype)
    return added(onto, torch.einsum("btsm,btsd->btmd", weights.to(wide), H.to(wide)).to(H.dtype))


def added(onto: Tensor | None, mixed: Tensor) -> Tensor:
    """onto + mixed, where there is something to add to."""
    return mixed if onto is None else onto + mixed
