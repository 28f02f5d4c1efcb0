"""x = sum_i softmax_i(w_a . rmsnorm(s_i) / sqrt(d)) s_i; s_i <- (1 - b_i) s_i + b_i y: Multi-Gate Residuals."""

import math

import torch

from tests.oracles.attnres import site_names


def _score(s, w, eps):
    return (s / torch.sqrt((s * s).mean(-1, keepdim=True) + eps) * w).sum(-1, keepdim=True) / math.sqrt(s.shape[-1])


def forward(x, parameters, sublayers, norms, *, layers, layout, streams, eps, bias=None):
    """The head's input."""

    def pooled(held, name):
        powers = [torch.exp(_score(s, parameters[f"at.{name}.pool.query"], eps)) for s in held]
        return sum(p * s for p, s in zip(powers, held, strict=True)) / sum(powers)

    held = [x]
    for f, name in enumerate(site_names(layers, layout)):
        y = sublayers[f](norms[f](x if f == 0 else pooled(held, name)))
        if len(held) < streams:
            held = [*held, y]
            continue
        w, b = parameters[f"at.{name}.mixer.weight"], parameters[f"at.{name}.mixer.bias"]
        betas = [torch.sigmoid(_score(s, w, eps) + b) for s in held]
        held = [(1 - beta) * s + beta * y for beta, s in zip(betas, held, strict=True)]
    return norms[-1](pooled(held, "head"))
