"""The residual stream duality (arXiv 2603.16039): reading depth is sliding-window attention on the other axis.

A stack U [l, b, t, d] holds what l layers left of every token. At layer l a depth read attends from U[l] to the last
K entries of its own token. Transpose depth and sequence, and that is causal attention in a window of K tokens. It
holds for a given stack and weights shared over depth; in a network the stack depends on the earlier reads.
"""

import torch

from residua import ops

LAYERS, BATCH, TOKENS, WIDTH, HEADS = 6, 2, 5, 8, 2
torch.manual_seed(0)
U = torch.randn(LAYERS, BATCH, TOKENS, WIDTH, dtype=torch.float64)
W_Q, W_K, W_V = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)


def over_depth(K):
    reads = []
    for l in range(LAYERS):
        seen = U[max(0, l - K + 1) : l + 1]
        keys, values = (tuple((seen @ W).unbind()) for W in (W_K, W_V))
        reads.append(ops.attend_qkv(U[l] @ W_Q, keys, values, heads=HEADS))
    return torch.stack(reads)


def over_sequence(K):
    X = U.permute(1, 2, 0, 3).flatten(0, 1)  # [b t, l, d]: every token's history, as a sequence
    q, k, v = ((X @ W).unflatten(-1, (HEADS, -1)).transpose(1, 2) for W in (W_Q, W_K, W_V))
    at = torch.arange(LAYERS)
    z = ops.window_attend(q, k, v, window=K, queries=at, keys=at).transpose(1, 2).flatten(-2)
    return z.unflatten(0, (BATCH, TOKENS)).permute(2, 0, 1, 3)


for K in (1, 2, 3, LAYERS):
    gap = (over_depth(K) - over_sequence(K)).abs().max().item()
    assert gap < 1e-12, gap
    print(f"window {K}: the two axes differ by {gap:.1e}")
