"""x = sum_i A_m[i] H_i; H_j <- sum_i A_r[i, j] H_i + B[j] f(norm(x)): Hyper-Connections, 2409.19606.

The n streams H_i are a plain list. With dynamic=true, [A_m | A_r] and B get s tanh(layernorm(H_i) W) each.
"""

import torch

EPS = 1e-5


def _layer_norm(h, gain, shift):
    mean = h.mean(-1, keepdim=True)
    variance = ((h - mean) ** 2).mean(-1, keepdim=True)
    return (h - mean) / torch.sqrt(variance + EPS) * gain + shift


def forward(x, parameters, sublayers, norms, *, layers, layout, streams, dynamic):
    """The head's input: the norm of the sum of the streams."""
    n = streams
    H = [x for _ in range(n)]
    ones = torch.ones_like(x[..., :1])
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            prefix = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            p = {k.removeprefix(prefix): q for k, q in parameters.items() if k.startswith(prefix)}
            # where reading could only scale what the norm rescales there is no A_m: the home stream is read
            learned = s > 0 and n > 1
            A_m = [p["read"][i] * ones if learned else float(i == s % n) * ones for i in range(n)]
            A_r = [[p["remix"][i, j] * ones for j in range(n)] for i in range(n)]
            B = [p["write"][j] * ones for j in range(n)]
            if dynamic:
                for i in range(n):
                    c = _layer_norm(H[i], p["gain"], p["shift"])
                    alpha = p["s_alpha"] * torch.tanh(c @ p["W_alpha"])
                    columns = [alpha[..., j : j + 1] for j in range(alpha.shape[-1])]
                    if learned:
                        A_m[i] = A_m[i] + columns.pop(0)
                    for j in range(n):
                        A_r[i][j] = A_r[i][j] + columns[j]
                    B[i] = B[i] + p["s_beta"] * torch.tanh((c * p["W_beta"]).sum(-1, keepdim=True))
            read = sum(A_m[i] * H[i] for i in range(n))
            y = sublayers[s](norms[s](read))
            H = [sum(A_r[i][j] * H[i] for i in range(n)) + B[j] * y for j in range(n)]
            s += 1
    return norms[-1](sum(H))
