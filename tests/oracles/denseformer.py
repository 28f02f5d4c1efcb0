"""X_0 = e; X_i = Block_i(Y_{i-1}); Y_i = sum_{j<=i, j=i mod k} alpha[i,j] X_j if p divides i, else Y_i = X_i.

Block_i keeps its inner residuals; Y_0 = X_0 and the head reads Y_L.
"""

import torch
from torch import Tensor


def forward(x, parameters, sublayers, norms, *, layers, layout, dilation=1, period=1) -> Tensor:
    """The head's normalised input."""
    X = [x]
    Y = x
    s = 0
    for i in range(1, layers + 1):
        h = Y
        for _ in layout:
            h = h + sublayers[s](norms[s](h))
            s += 1
        X.append(h)
        Y = h
        if i % period == 0:
            indices = [j for j in range(i + 1) if (i - j) % dilation == 0]
            if i == layers and len(indices) == 1:
                continue  # the final norm forgets a single weight: not built
            # the weights live where Y_i is read: at the next block's first sublayer, or the head
            reader = f"l{i}_{layout[0]}" if i < layers else "head"
            alpha = parameters[f"at.{reader}.alpha"]
            if len(alpha) != len(indices):
                raise ValueError(f"{len(alpha)} weights for the sources {indices}")
            Y = torch.zeros_like(h)
            for slot, j in enumerate(indices):
                Y = Y + alpha[slot] * X[j]
    return norms[-1](Y)
