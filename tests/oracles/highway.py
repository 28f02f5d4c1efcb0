"""h <- alpha h + beta f(norm(h)), the six forms of alpha and beta written out; out = norm(h)."""

import math

import torch
from torch import Tensor


def normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def forward(
    x, parameters, sublayers, norms, *, layers, layout,
    form="layerscale", start=None, norm=None, skip=None, temperature=0.3, eps=None,
) -> Tensor:  # fmt: skip
    """The head's normalised input. (`start` is where parameters begin, and they are given.)"""
    h, s, total = x, 0, layers * len(layout)
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            site = f"at.l{layer}_{kind}{turn + 1 if turn else ''}"
            read = h if form in ("rezero", "gate") and norm != "pre" else norms[s](h)
            y = sublayers[s](read)
            if form in ("layerscale", "rezero"):
                h = h + parameters[f"{site}.scale"] * y
            elif form == "gate":
                scores = (h[..., None, :] * parameters[f"{site}.weight"]).sum(-1) + parameters[f"{site}.bias"]
                share = 1 / (1 + torch.exp(-scores))
                h = (1 - share) * h + share * y
            elif form == "deepnorm":
                h = (total**0.25 if skip is None else skip) * h + y
            elif form == "beam":
                t = s + 2
                made = normed(y, 1e-6 if eps is None else eps) * parameters[f"{site}.norm.gain"]
                h = math.sqrt(t - 1) / math.sqrt(t) * h + made / math.sqrt(t)
            elif form == "muse":
                beta = 1 / (1 + torch.exp(-parameters[f"{site}.gate"] / temperature))
                alpha = torch.sqrt(torch.clamp(1 - beta**2, min=1e-3))
                if kind not in ("attn", "swa"):
                    y = y * parameters[f"{site}.gain"]
                h = alpha * h + beta * normed(y, 1e-8 if eps is None else eps)
            else:
                raise ValueError(f"form={form!r}")
            s += 1
    return norms[-1](h)
