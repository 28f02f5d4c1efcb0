"""x_s = h_s + g_s sum_n softmax_n(w_s . rmsnorm_s(d_n)) d_n, h_{s+1} = h_s + f_s(norm_s(x_s)) (2605.18855).

d = [e, o_0, o_1, ...], or [e, block deltas]. Only the input is enriched; the head reads the plain h.
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
    include_partial: bool = False,
    gate: str = "none",
    null: bool = False,
    value_lane: bool = False,
    centered: bool = False,
    compat: str = "none",
    eps: float = 1e-6,
) -> Tensor:
    """The head's normalised input."""
    if gate not in ("none", "scalar", "vector", "alpha"):
        raise ValueError(f"gate={gate}")
    if compat not in ("none", "released"):
        raise ValueError(f"compat={compat}")
    if block is not None and blocks is not None:
        raise ValueError("block or blocks, not both")
    if centered and null:
        raise ValueError("centered says what 1/n is only for the sources")
    released = compat == "released"
    if released and (include_partial or centered or value_lane):
        raise ValueError("the released code has none of these")
    span = 0  # layers a block of the released code; 0 is its per-sublayer mode
    if released and blocks is not None:
        span = math.ceil(layers / blocks)
    elif released and block is not None and block > 1:
        if block % len(layout):
            raise ValueError(f"block={block}: the released code has blocks of whole layers")
        span = block // len(layout)

    def read(prefix: str, h: Tensor, sources: list[Tensor]) -> Tensor:
        """h + g r, with what `prefix` owns."""
        if null and released:
            sources = [parameters[f"{prefix}.null.vector"].expand_as(h), *sources]
        if not sources or (centered and len(sources) == 1):
            return h  # nothing to mix, or 1 - 1/1 of it: such a site owns no parameters
        powers = []
        for d in sources:
            if len(sources) == 1 and (released or not null):
                power = torch.ones_like(h[..., :1])  # its weight is 1 for every query, so the site owns none
            else:
                w, g = parameters[f"{prefix}.query.query"], parameters[f"{prefix}.query.gain"]
                key = g * d / torch.sqrt((d * d).mean(-1, keepdim=True) + eps)
                power = torch.exp((w * key).sum(-1, keepdim=True))
            powers.append(power)
        denominator = sum(powers)
        if null and not released:  # one more logit, whose value is zero
            denominator = denominator + torch.exp(parameters[f"{prefix}.null.logit"])
        r = torch.zeros_like(h)
        for d, power in zip(sources, powers, strict=True):
            weight = power / denominator
            if centered:
                weight = weight - 1 / len(sources)
            r = r + weight * d
        return h + strength(prefix, h) * r

    def strength(prefix: str, h: Tensor) -> Tensor | float:
        """The gate g of a read."""
        if gate == "scalar":
            return torch.sigmoid(parameters[f"{prefix}.gate.logit"])
        if gate == "vector":
            return torch.sigmoid(h @ parameters[f"{prefix}.gate.weight"].T + parameters[f"{prefix}.gate.bias"])
        if gate == "alpha":
            return parameters[f"{prefix}.gate.alpha"]
        return 1.0

    names = site_names(layers, layout)
    h = x
    sources: list[Tensor] = []  # e joins once the first site has read the plain stream
    group = None  # the sum of the open block's outputs
    size = block or (math.ceil(len(names) / blocks) if blocks else 1)
    for s, site in enumerate(names):
        if not span and s > 0 and s % size == 0:
            sources.append(group)
            group = None
        seen = list(sources)
        if include_partial and group is not None:
            seen.append(group)
        z = read(f"at.{site}.0", h, seen)
        if value_lane and layout[s % len(layout)] in ("attn", "swa"):
            v = read(f"at.{site}.1", h, seen)
            o = sublayers[s](norms[s](z), norms[s](z), norms[s](v))
        else:
            o = sublayers[s](norms[s](z))
        if span:
            layer, place = divmod(s, len(layout))
            if place == 0 and layer % span == 0:
                # after the read and before h moves; the *source* before it is taken off, not the last state
                sources.append(h - sources[-1] if sources else h)
        elif s == 0:
            sources.append(x)
        group = o if group is None else group + o
        h = h + o
    return norms[-1](h)


def site_names(layers: int, layout: tuple[str, ...]) -> list[str]:
    """`l0_attn`, `l0_mlp`, ...; a second of a kind in a block is `l0_attn2`."""
    names = []
    for layer in range(layers):
        seen: dict[str, int] = {}
        for kind in layout:
            seen[kind] = seen.get(kind, 0) + 1
            names.append(f"l{layer}_{kind}" + (str(seen[kind]) if seen[kind] > 1 else ""))
    return names
