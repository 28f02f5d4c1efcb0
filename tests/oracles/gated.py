"""x = 1/n sum_i G_i N_i; R_i <- R_i + s_i f(x): the gated residual of Qwen3.8-Flash-Next, 2608.30320: no norms."""

import torch


def _read(R, parameters, prefix, eps):
    """The sublayer's input, and s: None where nothing writes."""
    n, width = len(R), R[0].shape[-1]
    gain = parameters[prefix + "gain"]
    N = [R[i] / torch.sqrt((R[i] * R[i]).mean(-1, keepdim=True) + eps) * (1 + gain[i]) for i in range(n)]
    flat = torch.cat(N, -1) / n
    hidden = [(flat * row).sum(-1, keepdim=True) for row in parameters[prefix + "down"]]
    hidden = [value / (1 + torch.exp(-value)) for value in hidden]
    x = torch.zeros_like(R[0])
    for i in range(n):
        rows = parameters[prefix + "up"][i * width : (i + 1) * width]
        gate = torch.sigmoid(sum(hidden[r] * rows[:, r] for r in range(len(hidden))))
        x = x + gate * N[i] / n
    if prefix + "inject" not in parameters:
        return x, None
    return x, [2 * torch.sigmoid((flat * row).sum(-1, keepdim=True)) for row in parameters[prefix + "inject"]]


def forward(x, parameters, sublayers, norms, *, layers, layout, streams, eps, rank=None):
    """What the head reads."""
    R = [x for _ in range(streams)]
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            read, inject = _read(R, parameters, f"at.l{layer}_{kind}{turn + 1 if turn else ''}.", eps)
            y = sublayers[s](read)
            R = [R[i] + inject[i] * y for i in range(streams)]
            s += 1
    return _read(R, parameters, "at.head.", eps)[0]
