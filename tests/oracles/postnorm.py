"""Norms of the stream, form by form: N has a gain of the design, norms[s] belongs to the backbone.

post, deepnorm  x = N(alpha x + f(x))            keel  x = N(alpha x + f(norm(x)))            out = x
resi_dual       o = f(x);            y += o; x = N(x + o)                                    out = x + norm(y)
siamese         o = f(x + norm(y));  y += o; x = N(x + o)                                    out = x + norm(y)
hybrid          x += attn(x); x = norm(x); x += mlp(x)                                       out = norm(x)
mixln           post in the first share of the blocks, x += f(norm(x)) in the others          out = norm(x), or x
"""

import torch
from torch import Tensor


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def forward(
    x, parameters, sublayers, norms, *, layers, layout,
    form="post", alpha=None, share=0.25, first="same", embed="raw", eps=1e-6,
) -> Tensor:  # fmt: skip
    """What the head reads."""
    total = layers * len(layout)
    if alpha is None:
        alpha = {"deepnorm": total**0.25, "keel": total}.get(form, 1)
    if embed == "normed":
        x = normed(x, parameters["embed.gain"], eps)
    y, s = x, 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            gain = parameters.get(f"at.l{layer}_{kind}{turn + 1 if turn else ''}.gain")
            f, norm = sublayers[s], norms[s]
            if form in ("post", "deepnorm") or (form == "mixln" and layer < share * layers):
                x = normed(alpha * x + f(x), gain, eps)
            elif form == "mixln" or (form == "hybrid" and first == "pre" and layer == 0):
                x = x + f(norm(x))
            elif form == "keel":
                x = normed(alpha * x + f(norm(x)), gain, eps)
            elif form in ("resi_dual", "siamese"):
                o = f(x if form == "resi_dual" else x + norm(y))
                y = y + o
                x = normed(x + o, gain, eps)
            elif form == "hybrid":
                if kind not in ("attn", "swa"):
                    x = norm(x)
                x = x + f(x)
            else:
                raise ValueError(f"form={form!r}")
            s += 1
    if form in ("resi_dual", "siamese"):
        return x + norms[-1](y)
    closed = form in ("post", "deepnorm", "keel") or (form == "mixln" and share >= 1)
    return x if closed else norms[-1](x)
