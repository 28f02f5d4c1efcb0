"""z_l = sum_j a_lj u_j W_V, a_l = softmax_j(u_l W_Q . u_j W_K / sqrt(d)), l - K < j <= l: the duality, 2603.16039.

u_0 is the embedding; u_l is the stream after layer l (states) or what layer l added to it (deltas).
"""

import math

import torch

KEY_EPS = 1e-6


def _unit(u):
    return u / torch.sqrt((u * u).mean(-1, keepdim=True) + KEY_EPS)


def _read(u, W, heads, key_norm):
    """The attention of the last of the sources `u` over all of them, head by head."""
    values = [one @ W["value"] for one in u]
    if len(u) == 1:
        return values[0]
    seen = [_unit(one) for one in u] if key_norm else u
    query = seen[-1] @ W["query"]
    size = query.shape[-1] // heads
    z = []
    for head in range(heads):
        cut = slice(head * size, (head + 1) * size)
        scores = [(query * (one @ W["key"]))[..., cut].sum(-1) / math.sqrt(size) for one in seen]
        total = sum(torch.exp(score) for score in scores)
        z.append(
            sum((torch.exp(score) / total)[..., None] * v[..., cut] for score, v in zip(scores, values, strict=True))
        )
    return torch.cat(z, -1)


def forward(
    x,
    parameters,
    sublayers,
    norms,
    *,
    layers,
    layout,
    window,
    sources,
    unit,
    enter,
    gate,
    heads,
    shared,
    key_norm,
):
    """The head's input: the stream itself, which the head reads as it is."""
    for name, choice, known in (
        ("sources", sources, ("states", "deltas")),
        ("unit", unit, ("layer", "sublayer")),
        ("enter", enter, ("input", "add", "qkv", "stream")),
        ("gate", gate, ("none", "alpha")),
    ):
        if choice not in known:
            raise ValueError(f"{name}={choice}")

    h = x
    u = [x]
    s = 0
    for layer in range(layers):
        added = 0  # what this layer has added so far
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            site = f"at.l{layer}_{kind}{turn + 1 if turn else ''}"
            if enter == "qkv":
                reads = kind in ("attn", "swa")
            else:
                reads = unit == "sublayer" or place == 0
            into = h
            if reads:
                prefix = "shared." if shared else f"{site}.project."
                W = {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}
                z = _read(u[-window:], W, heads, key_norm)
                if enter == "add":
                    g = parameters[f"{site}.gate.alpha"] if gate == "alpha" else 1
                    into = h + g * z
                else:
                    into = z
                if enter == "stream":
                    h = z
            y = sublayers[s](norms[s](into))
            h = h + y
            added = added + y
            if unit == "sublayer":
                u.append(h if sources == "states" else y)
            s += 1
        if unit == "layer":
            u.append(h if sources == "states" else added)
    return norms[-1](h)
