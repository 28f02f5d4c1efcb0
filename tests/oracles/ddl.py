"""X <- X + beta k (v' - k'X), k = y / sqrt(|y|^2 + eps^2), y = f(norm(x)), x = Compress(X): DDL, 2601.00417.

One channel j of the state at a time: X_j [b, t, d]. The state is a plain list of those channels.
"""

import torch


def _over_tokens(x, taps):
    """sum_s taps[s] x[t - s], with zeros before the first token."""
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for s in range(len(taps)):
            if t - s >= 0:
                y[:, t] = y[:, t] + taps[s] * x[:, t - s]
    return y


def _compress(X, p, kind, channels, kernel):
    """The state as one input of width d, by the compressor whose parameters are `p`."""
    if channels == 1:
        return X[0]
    x = torch.zeros_like(X[0])
    if kind == "channel":
        for j in range(channels):
            x = x + p["weight"][j] * X[j]
    elif kind == "token":
        for j in range(channels):
            x = x + p["pool"][j] * _over_tokens(X[j], p["conv.taps"][:, j])
    elif kind in ("channel_same", "channel_causal"):
        # position q of a convolution along the channels, padded to keep their number, then read out by pool
        left = kernel - 1 if kind == "channel_causal" else (kernel - 1) // 2
        for q in range(channels):
            for s in range(kernel):
                j = q + s - left
                if 0 <= j < channels:
                    x = x + p["pool"][q] * p["taps"][s] * X[j]
    else:
        raise ValueError(f"compress={kind}")
    return x


def _gate(c, p, gate):
    if gate == "linear":
        logit = c @ p["beta"] + p["beta_bias"]
    elif gate == "mlp":
        logit = torch.tanh(c @ p["beta_in"] + p["beta_in_bias"]) @ p["beta"] + p["beta_bias"]
    else:
        raise ValueError(f"gate={gate}")
    return 2 * torch.sigmoid(logit)


def _target(x, c, p, value):
    if value == "paper":
        return c @ p["value"]
    if value == "released":
        return 4 * torch.sigmoid(x @ p["value"] + p["value_bias"])
    raise ValueError(f"value={value}")


def forward(
    x,
    parameters,
    sublayers,
    norms,
    *,
    layers,
    layout,
    channels,
    expand,
    kernel,
    value,
    gate,
    beta_init,
    eps,
    start,
    compress=None,
):
    """The head's input. `beta_init` only says where beta_bias starts."""
    if start not in ("paper", "standard"):
        raise ValueError(f"start={start}")
    kind = compress or "channel"

    def named(prefix):
        return {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}

    if expand == "repeat":
        X = [x for _ in range(channels)]
    elif expand == "conv":
        X = [_over_tokens(x, parameters["expand.taps"][:, j]) for j in range(channels)]
    else:
        raise ValueError(f"expand={expand}")

    s = 0
    for layer in range(layers):
        opening = named(f"at.l{layer}_{layout[0]}.compress.")  # one compressor for all sublayers of a block
        for place, sort in enumerate(layout):
            turn = layout[:place].count(sort)
            p = named(f"at.l{layer}_{sort}{turn + 1 if turn else ''}.rewrite.")
            h = _compress(X, opening, kind, channels, kernel)
            c = norms[s](h)
            y = sublayers[s](c)
            length = torch.sqrt((y * y).sum(-1, keepdim=True) + eps**2)
            k = y / length
            beta = _gate(c, p, gate)[..., None]
            v = _target(h, c, p, value)
            for j in range(channels):
                held = (k * X[j]).sum(-1, keepdim=True)
                write = beta * k * (v[..., j : j + 1] - held)
                if start == "standard":
                    write = (1 - p["blend"]) * y + p["blend"] * write
                X[j] = X[j] + write
            s += 1
    return norms[-1](_compress(X, named("at.head.compress."), kind, channels, kernel))
