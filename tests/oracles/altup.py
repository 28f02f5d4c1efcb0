"""p_k = s_k + sum_j C[k, j] s_j; a = block(p_0); s_k <- p_k + (1 + c_k)(a - p_0): AltUp as in Gemma 3n.

The streams s_k are a plain list, and every coefficient is taken out of its matrix by hand.
"""

import math

import torch


def _norm(x, gain, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _sized(x, like):
    size = torch.sqrt((like * like).mean(-1, keepdim=True))
    own = torch.sqrt(torch.maximum((x * x).mean(-1, keepdim=True), torch.tensor(1e-5, dtype=x.dtype)))
    return x * size / own


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _held(weight, clip):
    return torch.clamp(weight, -clip, clip) if clip else weight


def forward(x, parameters, sublayers, norms, *, layers, layout, streams, ple, laurel, clip, eps, start, ids=None):
    """The head's input."""
    n, d, q = streams, x.shape[-1], parameters
    s = [x] + [_sized(x @ q[f"project.stream{k}"].T, x) for k in range(1, n)]
    f = 0
    for layer in range(layers):
        first = f"at.l{layer}_{layout[0]}.altup."

        def routed(h, first=first):
            return torch.tanh(_norm(h, q[first + "gain"], eps) / d @ q[first + "router"].T)

        r = routed(s[0])
        predict = _held(q[first + "predict"], clip)
        C = [[(r * predict[k * n + j]).sum(-1, keepdim=True) for j in range(n)] for k in range(n)]
        p = [s[k] + sum(C[k][j] * s[j] for j in range(n)) for k in range(n)]
        a = p[0]
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            u = norms[f](a)
            y = sublayers[f](u)
            if laurel and kind in ("attn", "swa"):
                name = f"at.l{layer}_{kind}{turn + 1 if turn else ''}.laurel."
                low = _norm(u @ q[name + "left"].T @ q[name + "right"].T, q[name + "gain"], eps)
                a = (a + y + u + low) / math.sqrt(2)
            else:
                a = a + y
            f += 1
        r = routed(a)
        correct = _held(q[first + "correct"], clip)
        c = [(r * correct[k]).sum(-1, keepdim=True) for k in range(n)]
        s = [p[k] + (1 + c[k]) * (a - p[0]) for k in range(n)]
        if ple:
            name = f"at.l{layer}_{layout[0]}.ple."
            rows = slice(layer * ple, (layer + 1) * ple)
            made = _norm(x @ q["lookup.project"][rows].T / math.sqrt(d), q["lookup.gain"], eps)
            t = (made + math.sqrt(ple) * q["lookup.table"][ids][..., rows]) / math.sqrt(2)
            inner = _gelu((s[0] * q[name + "scale"]) @ q[name + "gate"].T) * t
            added = _norm(inner @ q[name + "project"].T, q[name + "gain"], eps)
            s = [s[0]] + [s[k] + added for k in range(1, n)]
    others = [_sized(s[k] @ q[f"at.head.stream{k}"].T, s[0]) for k in range(1, n)]
    return norms[-1]((s[0] + sum(others)) / n)
