"""asymmetry(target): one window of attention, over tokens or over layers, and what each placement adds to the model.

The operator is the same (`residua duality` shows it); the bill is not. Both are compared with the plain model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from residua.lab.common.files import Values
from residua.lab.cost.predict import Cost, predict
from residua.lab.cost.targets import Target

PLACEMENTS: Mapping[str, tuple[str, str]] = {
    "sequence: ShortSWA before attention": ("swa:window={w},attn,mlp", "standard"),
    "depth: attention over states (depthswa)": ("attn,mlp", "depthswa:window={w}"),
    "depth: static queries (attnres)": ("attn,mlp", "attnres:window={w}"),
}
"""A label, and the layout and design of a window of w."""

QUANTITIES: Mapping[str, str] = {
    "flops": "operations a token",
    "bytes_moved": "bytes moved a token",
    "saved_bytes": "bytes kept for backward, a token",
    "cut": "bytes at a pipeline cut, a token",
    "cache_bytes": "decode cache, bytes a sequence",
    "halo_bytes": "context-parallel halo, bytes",
}
"""What is drawn; those of a whole sequence are not divided by its tokens."""


def asymmetry(
    target: Target,
    windows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    tokens: int = 2048,
    *,
    dtype: torch.dtype = torch.bfloat16,
    path: str = "fused",
) -> Values:
    """What each placement adds at every window, as plain values for a plot or a table."""
    depth = target.config.depth
    usable = [window for window in windows if window <= tokens]

    def cost(layout: str, design: str) -> Cost:
        chosen = replace(target.config, layout=layout, design=design)
        return predict(chosen, tokens, dtype=dtype, path=path, build=target.build)

    plain = cost("attn,mlp", "standard")
    series: dict[str, dict[str, list[float | None]]] = {}
    for label, (layout, design) in PLACEMENTS.items():
        # a model of L blocks has L + 1 states and 2 L + 1 outputs: a wider window over them is that one
        most = depth + 1 if "depthswa" in design else 2 * depth + 1 if "attnres" in design else tokens
        found = [
            cost(layout.format(w=window), design.format(w=window)) if window <= most else None for window in usable
        ]
        series[label] = {
            key: [None if one is None else _share(one, key) - _share(plain, key) for one in found]
            for key in ("parameters", *QUANTITIES)
        }
    return {
        "windows": usable,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "path": path,
        "model": target.config.to_json(),
        "plain": {key: _share(plain, key) for key in ("parameters", *QUANTITIES)},
        "titles": dict(QUANTITIES),
        "added": series,
    }


def _share(cost: Cost, key: str) -> float:
    value = float(getattr(cost, key))
    return value if key in ("parameters", "cache_bytes", "halo_bytes") else value / cost.tokens
