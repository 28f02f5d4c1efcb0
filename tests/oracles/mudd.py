"""A_i = GELU(rms(X_i) W1) W2 + a_i; X^c_i = sum_{j<=i} A^c_i[j] X_j for c in q, k, v, r.

h = X^r + MHA(X^q, X^k, X^v); X_{i+1} = h + FFN(h). The first block reads X_0, and the head X^r_L.
PrePostDANorm: X^c_i = X_i + post_c(sum_j A^c_i[j] rms(X_j)), a gain each for all four lanes, or for r alone.
"""

import math

import torch
from torch import Tensor

EPS = 1e-6


def rms(x: Tensor) -> Tensor:
    """x over its root mean square, without gain."""
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the exact Gaussian distribution function."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def indices(i: int, window: int | None, dilation: int) -> list[int]:
    """Which X_j are mixed after block i: every k-th; of those, the last `window` and the embedding."""
    every = [j for j in range(i + 1) if (i - j) % dilation == 0]
    if window is None:
        return every
    blocks = [j for j in every if j > 0]
    return [j for j in every if j == 0] + blocks[max(len(blocks) - window, 0) :]


def forward(
    x,
    parameters,
    sublayers,
    norms,
    *,
    layers,
    layout,
    prepost="auto",
    window=None,
    dilation=1,
    period=1,
    hidden="paper",
) -> Tensor:
    """The head's normalised input."""
    if prepost == "auto":
        prepost = "all" if layers >= 24 else "none"
    if prepost not in ("none", "all", "r"):
        raise ValueError(f"prepost={prepost!r}")
    if hidden not in ("paper", "released"):
        raise ValueError(f"hidden={hidden!r}")
    X = [x]
    mixed = [x]  # the lanes of the block to come: one for all, or (q, k, v, r), or (x, r)
    s = 0
    for i in range(1, layers + 1):
        *inputs, h = mixed if len(mixed) > 1 else mixed * 2
        for _ in layout:
            h = h + sublayers[s](*[norms[s](one) for one in inputs])
            inputs = [h]
            s += 1
        X.append(h)
        mixed = [h]
        if i % period:
            continue
        if i == layers:
            site, lanes = "at.head", 1
        else:
            site, lanes = f"at.l{i}_{layout[0]}", 4 if layout[0] in ("attn", "swa") else 2
        sources = indices(i, window, dilation)
        n = len(sources)
        W1, W2, a = parameters[f"{site}.W1"], parameters[f"{site}.W2"], parameters[f"{site}.a"]
        width = lanes * n * (4 if i == layers else 1)
        if hidden == "released":
            width = (width // 64 + 1) * 64  # past an exact multiple too
        if W1.shape != (x.shape[-1], width) or W2.shape != (width, lanes * n) or a.shape != (lanes, n):
            raise ValueError(f"{site}: {W1.shape}, {W2.shape}, {a.shape} for {lanes} lanes over {sources}")
        dynamic = gelu(rms(h) @ W1) @ W2
        mixed = []
        for c in range(lanes):
            total = torch.zeros_like(h)
            for slot, j in enumerate(sources):
                weight = dynamic[..., c * n + slot : c * n + slot + 1] + a[c, slot]
                total = total + weight * (X[j] if prepost == "none" else rms(X[j]))
            if prepost == "all":
                total = parameters[f"{site}.post"][c] * rms(total)
            elif prepost == "r" and c == lanes - 1:
                total = parameters[f"{site}.post"][0] * rms(total)
            mixed.append(total if prepost == "none" else h + total)
    return norms[-1](mixed[0])
