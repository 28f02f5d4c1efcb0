"""x_l = sum_{i<=l} softmax(a_l)_i H_i; a = Att(x_l); H_{l+1} = a + MLP(a or x_l + a); x_l is not added back.

H_0 is the embedding behind a layer norm. A longer block feeds its next sublayer the sum of its outputs so far (with or
without x_l).
"""

import torch
from torch import Tensor

# what the released files feed to the MLP: only the base file leaves x out
MLP_INPUT = {"base": "attn", "zero": "sum", "normalized": "sum", "weighted": "sum"}


def softmax_mix(logits: Tensor, sources: list[Tensor]) -> Tensor:
    """sum_i softmax(logits)_i sources_i, one source after the other."""
    weights = torch.exp(logits) / torch.exp(logits).sum()
    mixed = torch.zeros_like(sources[0])
    for i, source in enumerate(sources):
        mixed = mixed + weights[i] * source
    return mixed


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Zero mean and unit (biased) variance over the width, without gain."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)


def forward(
    x, parameters, sublayers, norms, *, layers, layout, variant="base", mlp_input=None, embed="normed", eps=1e-7
) -> Tensor:
    """The head's normalised input."""
    mlp_input = mlp_input or MLP_INPUT[variant]
    if mlp_input not in ("attn", "sum"):
        raise ValueError(f"mlp_input={mlp_input!r}")
    H = [layer_norm(x, eps) if embed == "normed" else x]
    s = 0
    for layer in range(layers):
        if layer == 0:
            x_l = H[0]  # a softmax over one source is 1, so its parameter is not built
        else:
            x_l = softmax_mix(parameters[f"at.l{layer}_{layout[0]}.alpha"], H)
        made = sublayers[s](norms[s](x_l))
        s += 1
        for _ in layout[1:]:
            fed = made if mlp_input == "attn" else x_l + made
            made = made + sublayers[s](norms[s](fed))
            s += 1
        H.append(layer_norm(made, eps) if variant == "normalized" else made)
    if variant == "weighted":
        return norms[-1](softmax_mix(parameters["at.head.alpha"], H))
    return norms[-1](H[-1])
