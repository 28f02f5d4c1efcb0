"""x = sum_n softmax_n(q . rmsnorm(k_n) / sqrt(r) + log c_n) v_n: low-rank Attention Residuals, 2607.09694.

A source is a list of (value, key) pairs, one of each sublayer in it; its value is their mean, its key their sum.
"""

import math

import torch

from tests.oracles.attnres import block_size, site_names


def _norm(k, eps):
    return k / torch.sqrt((k * k).mean(-1, keepdim=True) + eps)


def forward(x, parameters, sublayers, norms, *, layers, layout, key, eps, rank=None, block=None, blocks=None):
    """The head's input."""
    width = x.shape[-1]
    rank = min(32, width) if rank is None else rank
    names = site_names(layers, layout)
    size = block_size(len(names), block, blocks)

    def pair(y, name):
        if key == "sliced":
            return y, y[..., width - rank :]
        if y.shape[-1] == width:
            return y, y @ parameters[f"keys.{name}.key"].T
        return y[..., :width], y[..., width:]

    def read(groups, name):
        powers, means = [], []
        for group in groups:
            k = _norm(sum(k for _, k in group), eps)
            score = (k * parameters[f"at.{name}.query"]).sum(-1, keepdim=True) / math.sqrt(rank)
            powers.append(len(group) * torch.exp(score))
            means.append(sum(v for v, _ in group) / len(group))
        return sum(p / sum(powers) * v for p, v in zip(powers, means, strict=True))

    groups = [[pair(x, "embed")]]
    for s, name in enumerate(names):
        z = x if s == 0 else read(groups, name)
        y = pair(sublayers[s](norms[s](z)), name)
        if s % size == 0:
            groups.append([])
        groups[-1].append(y)
    return norms[-1](read(groups, "head"))
