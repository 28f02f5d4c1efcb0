"""g = sum_j (b_j + relu(w . f_j)) f_j over the deltas f_0 = e, f_1, ..., one g each for q, k and v.

a = MHA(q_in, k_in, v_in); y = FFN(q_in + a); f_t = a + y, a delta: what the block read is not added.
k-DCA: the sources are f_0, the sum of the middle deltas, and the last k of them.
"""

import torch
from torch import Tensor


def explicit(deltas: list[Tensor], window: int | None) -> list[Tensor]:
    """The sources of a read, the embedding first; k-DCA folds the middle into one."""
    embedding, rest = deltas[0], deltas[1:]
    if window is None or len(rest) <= window:
        return [embedding, *rest]
    middle = torch.zeros_like(embedding)
    for f in rest[: len(rest) - window]:
        middle = middle + f
    return [embedding, middle, *rest[len(rest) - window :]]


def gated(sources: list[Tensor], parameters: dict[str, Tensor], prefix: str, version: str) -> Tensor:
    """One gated residual network, source after source."""
    bias = parameters[f"{prefix}.bias"]
    if len(bias) != len(sources):
        raise ValueError(f"{prefix}: {len(bias)} weights for {len(sources)} sources")
    g = torch.zeros_like(sources[0])
    for j, f in enumerate(sources):
        weight = bias[j]  # v1: a scalar; v2, v3: one per channel
        if version == "v3":
            z = (parameters[f"{prefix}.gate"] * f).sum(-1, keepdim=True)  # per token, shared by the channels
            weight = weight + z.clamp(min=0)  # a relu of slope 1 at 0, or the gate would never leave w = 0
        g = g + weight * f
    return g


def forward(x, parameters, sublayers, norms, *, layers, layout, grn="v3", lanes="three", window=None) -> Tensor:
    """The head's normalised input."""
    if grn not in ("v1", "v2", "v3"):
        raise ValueError(f"grn={grn!r}")
    if lanes not in ("three", "one"):
        raise ValueError(f"lanes={lanes!r}")
    count = 3 if lanes == "three" and layout[0] in ("attn", "swa") else 1
    deltas = [x]
    s = 0
    for layer in range(layers):
        sources = explicit(deltas, window)
        # v1 over one source: the norm undoes the scalars of k and v, and all three lanes share q's
        lanes_here = 1 if grn == "v1" and layer == 0 else count
        inputs = [gated(sources, parameters, f"at.l{layer}_{layout[0]}.{c}", grn) for c in range(lanes_here)]
        made = sublayers[s](*[norms[s](one) for one in inputs])
        s += 1
        for _ in layout[1:]:
            made = made + sublayers[s](norms[s](inputs[0] + made))
            s += 1
        deltas.append(made)
    return norms[-1](gated(explicit(deltas, window), parameters, "at.head.0", grn))
