"""The definition of `window_attend`: a full score matrix under a mask."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def window_mask(queries: Tensor, keys: Tensor, *, window: int, mode: str, causal: bool) -> Tensor:
    """Which key positions each query position sees: [..., t, n], True where it does."""
    q, k = queries.unsqueeze(-1), keys.unsqueeze(-2)
    if mode == "sliding":
        near = (q - k).abs() < window
    elif mode == "local":
        near = q // window == k // window
    else:
        raise ValueError(f"window_attend: mode is sliding or local, not {mode!r}")
    seen = near & (k >= 0)
    return seen & (k <= q) if causal else seen


def window_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    mode: str,
    queries: Tensor,
    keys: Tensor,
    causal: bool,
) -> Tensor:
    """PyTorch's attention under the mask."""
    mask = window_mask(queries, keys, window=window, mode=mode, causal=causal)
    mask = mask.unsqueeze(-3) if mask.ndim == 3 else mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
