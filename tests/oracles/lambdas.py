"""x <- r x + l x0 before a block, two plain sublayers, x - b m at the head: nanochat; and modded-nanogpt's forms.

Everything is a list of blocks; smear runs token by token.
"""

import torch

EPS = 2.0**-23


def _smeared(x, weight, scale):
    tokens = [x[:, 0]]
    for t in range(1, x.shape[1]):
        gate = scale * torch.sigmoid((x[:, t, : len(weight)] * weight).sum(-1, keepdim=True))
        tokens.append(x[:, t] + gate * x[:, t - 1])
    return torch.stack(tokens, 1)


def forward(x, parameters, sublayers, norms, *, layers, layout, init, each, backout, skips, normed, smear, middle=None):
    """The head's input."""
    if normed:
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    if smear:
        x = _smeared(x, parameters["smear.weight"], parameters["smear.scale"])
    x0, outputs, s = x, [], 0
    for layer in range(layers):
        first = f"at.l{layer}_{layout[0]}."
        mirror = layers - 1 - layer
        if skips == "unet" and mirror < layers // 2:
            x = x + parameters[first + "skip"] * outputs[mirror]
        if each == "block":
            x = parameters[first + "resid"] * x + parameters[first + "x0"] * x0
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            name = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            y = sublayers[s](norms[s](x))
            if each == "block":
                x = x + y
            else:
                x = parameters[name + "resid"] * x + parameters[name + "post"] * y
                if place == 0:
                    x = x + parameters[first + "x0"] * x0
            s += 1
        outputs.append(x)
    at = layers // 2 if middle is None else middle
    if backout and at < layers - 1:
        x = x - parameters["at.head.backout"] * outputs[at]
    return norms[-1](x)
