"""x_l = sum_{i<=l} softmax(a_l)_i H_i / |H_i|; a = Att(x_l); H_{l+1} = a + MLP(x_l + a).

ELC-BERT "normalized" with another norm, for decoders: the head reads H_L / |H_L|.
"""

import torch
from torch import Tensor


def normalised(H: Tensor, norm: str, eps: float) -> Tensor:
    """H divided by its own norm over the width."""
    if norm == "rms":
        return H / torch.sqrt((H**2).mean(-1, keepdim=True) + eps)
    if norm == "l2":
        return H / torch.sqrt((H**2).sum(-1, keepdim=True) + eps**2)  # eps is a length here, not a square
    if norm == "layernorm":
        centred = H - H.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
    raise ValueError(f"norm={norm!r}")


def forward(
    x,
    parameters,
    sublayers,
    norms,
    *,
    layers,
    layout,
    norm="rms",
    inner_residual=False,
    init="zero",
    eps=1e-6,
) -> Tensor:
    """The head's normalised input."""
    if init not in ("zero", "last"):  # it says where the parameters start, so nothing below depends on it
        raise ValueError(f"init={init!r}")
    H = [x]
    s = 0
    for layer in range(layers):
        if layer == 0:
            weights = torch.ones(1, dtype=x.dtype)  # a softmax over one source: its parameter is not built
        else:
            a = parameters[f"at.l{layer}_{layout[0]}.alpha"]
            weights = torch.exp(a) / torch.exp(a).sum()
        x_l = torch.zeros_like(x)
        for i in range(layer + 1):
            x_l = x_l + weights[i] * normalised(H[i], norm, eps)
        made = torch.zeros_like(x)
        for _ in layout:
            made = made + sublayers[s](norms[s](x_l + made))
            s += 1
        H.append(x_l + made if inner_residual else made)
    return norms[-1](normalised(H[-1], norm, eps))
