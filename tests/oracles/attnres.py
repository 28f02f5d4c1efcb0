"""x_s = sum_n softmax_n(w_s . rmsnorm_s(v_n)) v_n over v = [e, o_0, o_1, ...] (Kimi, 2603.15031).

The loops follow the push-first bookkeeping: a finished block joins the sources before the next site reads.
"""

import math

import torch
from torch import Tensor


def forward(
    x: Tensor,
    parameters: dict[str, Tensor],
    sublayers,
    norms,
    *,
    layers: int,
    layout: tuple[str, ...],
    block: int | None = None,
    blocks: int | None = None,
    sources: str = "outputs",
    total: bool = False,
    heads: int = 1,
    window: int | None = None,
    evicted: str = "sum",
    eps: float = 1e-6,
    init_std: float = 0.0,
) -> Tensor:
    """The head's normalised input."""
    if sources not in ("outputs", "states"):
        raise ValueError(f"sources={sources}")
    if evicted not in ("sum", "drop"):
        raise ValueError(f"evicted={evicted}")
    if sources == "states" and window is not None and evicted == "sum":
        raise ValueError("a state already holds the ones before it: there is no sum of evicted states")
    names = site_names(layers, layout)
    size = block_size(len(names), block, blocks)

    def read(site: str, values: list[Tensor]) -> Tensor:
        query, gain = parameters[f"at.{site}.query"], parameters[f"at.{site}.gain"]
        mixed = mixture(values, query, gain, heads, eps)
        return len(values) * mixed if total else mixed

    finished: list[Tensor] = []  # one value per finished block, without the embedding
    partial = None  # the open block: the sum of its outputs, or the state inside it
    stream = x
    for s, site in enumerate(names):
        if s % size == 0 and partial is not None:
            finished.append(partial)
            partial = None
        values = kept(x, finished, partial, window, evicted)
        # one source is its own softmax mixture, whatever the query: the first site has no parameters
        z = x if s == 0 else read(site, values)
        o = sublayers[s](norms[s](z))
        if sources == "states":
            stream = stream + o
            partial = stream
        else:
            partial = o if partial is None else partial + o
    if len(names) % size == 0:
        finished.append(partial)
        partial = None
    # otherwise the last block is short: it never finished, so the head sees it whatever the window
    return norms[-1](read("head", kept(x, finished, partial, window, evicted)))


def kept(e: Tensor, finished: list[Tensor], partial: Tensor | None, window: int | None, evicted: str) -> list[Tensor]:
    """What a site sees: e, (the sum of the evicted,) the last `window` finished values, the open block."""
    values = [e]
    first = 0 if window is None else max(0, len(finished) - window)
    if first > 0 and evicted == "sum":
        gone = finished[0]
        for value in finished[1:first]:
            gone = gone + value
        values.append(gone)
    for value in finished[first:]:
        values.append(value)
    if partial is not None:
        values.append(partial)
    return values


def mixture(values: list[Tensor], query: Tensor, gain: Tensor, heads: int, eps: float) -> Tensor:
    """sum_n softmax_n(w . (g * v_n / rms(v_n))) v_n, one softmax for each of `heads` slices of the width."""
    width = query.shape[0]
    if width % heads:
        raise ValueError(f"heads={heads} for width {width}")
    slices = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        powers = []
        for v in values:
            key = gain * v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)  # over the whole width
            powers.append(torch.exp((query[part] * key[..., part]).sum(-1, keepdim=True)))
        denominator = sum(powers)
        mixed = torch.zeros_like(values[0][..., part])
        for v, power in zip(values, powers, strict=True):
            mixed = mixed + power / denominator * v[..., part]
        slices.append(mixed)
    return torch.cat(slices, -1)


def site_names(layers: int, layout: tuple[str, ...]) -> list[str]:
    """`l0_attn`, `l0_mlp`, ...; a second of a kind in a block is `l0_attn2`."""
    names = []
    for layer in range(layers):
        seen: dict[str, int] = {}
        for kind in layout:
            seen[kind] = seen.get(kind, 0) + 1
            names.append(f"l{layer}_{kind}" + (str(seen[kind]) if seen[kind] > 1 else ""))
    return names


def block_size(count: int, block: int | None, blocks: int | None) -> int:
    """Sublayers a source: given, or enough that `blocks` of them cover all; 1 otherwise (the full form)."""
    if block is not None and blocks is not None:
        raise ValueError("block or blocks, not both")
    if block is not None:
        return block
    return 1 if blocks is None else math.ceil(count / blocks)
