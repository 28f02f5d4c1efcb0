"""x <- alpha f(norm(x)) + beta (x + B A x): LAuReL, 2411.07501; and the form of Gemma 3n."""

import math

import torch


def forward(x, parameters, sublayers, norms, *, layers, layout, rank, weights, form, eps):
    """The head's input."""
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            prefix = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            p = {k.removeprefix(prefix): q for k, q in parameters.items() if k.startswith(prefix)}
            u = norms[s](x)
            y = sublayers[s](u)
            if form == "gemma3n":
                if kind in ("attn", "swa"):
                    low = u @ p["left"].T @ p["right"].T
                    low = low / torch.sqrt((low * low).mean(-1, keepdim=True) + eps) * p["gain"]
                    x = (x + y + u + low) / math.sqrt(2)
                else:
                    x = x + y
            else:
                low = (p["up"] @ p["down"] @ x[..., None])[..., 0] if rank else 0.0
                alpha, beta = 1.0, 1.0
                if weights == "free":
                    alpha, beta = p["weights"][0], p["weights"][1]
                if weights == "softmax":
                    alpha = torch.sigmoid(p["weights"][0] - p["weights"][1])
                    beta = 1 - alpha
                x = alpha * y + beta * (x + low)
            s += 1
    return norms[-1](x)
