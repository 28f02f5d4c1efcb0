"""The definition of `window_attend`: a full score matrix under a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from residua.native.guard import transformed


def window_mask(queries: Tensor, keys: Tensor, *, window: int, mode: str, causal: bool) -> Tensor:
    """Which key positions each query position sees: [..., t, n], True where it does."""
    q, k = queries.unsqueeze(-1), keys.unsqueeze(-2)
    if mode == "sliding":
        near = (q - k).abs() < window
    elif mode == "local":
        near = q // window == k // window
    else:
        raise ValueError(f"window_attend: mode is sliding or local, not {mode!r}")
    seen = near & (k >= 0) & (q >= 0)
    return seen & (k <= q) if causal else seen


def biased(seen: Tensor, queries: Tensor, keys: Tensor, bias: Tensor, *, window: int, causal: bool) -> Tensor:
    """The logits that `bias` adds, -inf where a key is not seen: [..., head, t, n]."""
    distance = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).clamp(0 if causal else 1 - window, window - 1)
    added = bias[:, distance if causal else distance + window - 1].movedim(0, -3)
    return torch.where(seen.unsqueeze(-3), added, -torch.inf)


def default_positions(q: Tensor, k: Tensor, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys are 0, 1, 2, ... and the queries are the last of them, where nothing else is said."""
    if keys is None:
        keys = torch.arange(k.shape[-2], device=k.device)
    return (keys[..., keys.shape[-1] - q.shape[-2] :] if queries is None else queries), keys


def window_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    mode: str,
    queries: Tensor | None,
    keys: Tensor | None,
    causal: bool,
    bias: Tensor | None,
) -> Tensor:
    """PyTorch's attention under the mask."""
    queries, keys = default_positions(q, k, queries, keys)
    mask = window_mask(queries, keys, window=window, mode=mode, causal=causal)
    if bias is not None:
        mask = biased(mask, queries, keys, bias.to(q.dtype), window=window, causal=causal)
    elif mask.ndim == 3:
        mask = mask.unsqueeze(-3)
    if transformed(q, k, v):  # the fused kernel knows of no tangents
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
