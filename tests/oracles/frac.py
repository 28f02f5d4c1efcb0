"""x_k = sum_i Y[i, k] H_i; H_k <- sum_i A[i, k] H_i + B[k] y_k: Frac-Connections, 2503.14125.

The m fractions H_i, each d/m wide, are a plain list, as in the oracle of Hyper-Connections the streams are.
"""

import torch

EPS = 1e-5


def _layer_norm(h, gain, shift):
    mean = h.mean(-1, keepdim=True)
    variance = ((h - mean) ** 2).mean(-1, keepdim=True)
    return (h - mean) / torch.sqrt(variance + EPS) * gain + shift


def forward(x, parameters, sublayers, norms, *, layers, layout, fractions, dynamic):
    """The head's input: the norm of the fractions side by side."""
    m, size = fractions, x.shape[-1] // fractions
    H = list(x.split(size, -1))
    ones = torch.ones_like(x[..., :1])
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            prefix = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            p = {k.removeprefix(prefix): q for k, q in parameters.items() if k.startswith(prefix)}
            Y = [[p["read"][i, k] * ones if m > 1 else ones for k in range(m)] for i in range(m)]
            A = [[p["remix"][i, k] * ones for k in range(m)] for i in range(m)]
            B = [p["write"][k] * ones for k in range(m)]
            if dynamic:
                for i in range(m):
                    c = _layer_norm(H[i], p["gain"], p["shift"])
                    moved = p["s_alpha"] * torch.tanh(c @ p["W_alpha"])
                    columns = [moved[..., j : j + 1] for j in range(moved.shape[-1])]
                    if m > 1:
                        Y[i] = [Y[i][k] + columns.pop(0) for k in range(m)]
                    A[i] = [A[i][k] + columns[k] for k in range(m)]
                    B[i] = B[i] + p["s_beta"] * torch.tanh((c * p["W_beta"]).sum(-1, keepdim=True))
            read = torch.cat([sum(Y[i][k] * H[i] for i in range(m)) for k in range(m)], -1)
            y = sublayers[s](norms[s](read)).split(size, -1)
            H = [sum(A[i][k] * H[i] for i in range(m)) + B[k] * y[k] for k in range(m)]
            s += 1
    return norms[-1](torch.cat(H, -1))
