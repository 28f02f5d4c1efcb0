"""Every op as data, kernels or none: what to draw and what to call. Laws that hold for any op run over all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from residua import ops
from residua.ops.attend import ahead, merge
from residua.ops.window_attend.position import rotations

Call = Callable[..., Tensor]


def window(shape: tuple[int, ...] = (2, 2, 40, 6), **options: object) -> tuple[list[tuple[int, ...]], Call]:
    """A window over tokens, long enough for several chunks."""
    return [shape] * 3, lambda q, k, v: ops.window_attend(q, k, v, **{"window": 3, **options})


def groups(heads: int) -> Call:
    """Two reads that share a pass over two sources, each read on with a third."""

    def call(queries: Tensor, nulls: Tensor, *sources: Tensor) -> Tensor:
        carries, same = ahead(queries, sources[:2], nulls, eps=1e-6, heads=heads)
        reads = [merge(carries[k], queries[k], sources[2:], eps=1e-6, heads=heads, scale=1 + k) for k in range(2)]
        return torch.stack([*reads, same[0], carries[0].value])

    return call


def by_single_reads(heads: int) -> Call:
    """What `groups` gives, read by read."""

    def call(queries: Tensor, nulls: Tensor, *sources: Tensor) -> Tensor:
        def read(k: int, seen: tuple[Tensor, ...]) -> Tensor:
            return ops.attend(queries[k], seen, null=nulls[k : k + 1], heads=heads)

        return torch.stack([read(0, sources), 2 * read(1, sources), sources[0], read(0, sources[:2])])

    return call


def both_mixtures(read: Tensor, weights: Tensor, H: Tensor) -> Tensor:
    """A read and a remix of the same streams."""
    x, rest = ops.read_remix(read, weights, H)
    return torch.cat([x[:, :, None], rest], 2)


B, T, D = 2, 5, 12
TURNS = rotations(torch.arange(T), 4, 100.0, torch.float64)
READ = [(D,), (1,), *[(B, T, D)] * 3]

OPS: dict[str, tuple[list[tuple[int, ...]], Call]] = {
    "attend": (READ, lambda query, null, *v: ops.attend(query, v, null=null)),
    "attend-heads": (READ, lambda query, null, *v: ops.attend(query, v, null=null, heads=3, total=True)),
    "attend-onto": (READ, lambda query, null, onto, *v: ops.attend(query, v, null=null, onto=onto)),
    "attend_weights": (READ, lambda query, null, *v: ops.attend_weights(query, v, null=null)),
    "attend_qkv": ([(B, T, D)] * 5, lambda q, a, b, c, d: ops.attend_qkv(q, (a, b), (c, d), heads=2)),
    "attend_qkv_weights": ([(B, T, D)] * 3, lambda q, a, b: ops.attend_qkv_weights(q, (a, b), heads=2)),
    "mix-static": ([(2,), *[(B, T, D)] * 2], lambda w, *v: ops.mix(w, v)),
    "mix-channel": ([(2, D), *[(B, T, D)] * 2], lambda w, *v: ops.mix(w, v)),
    "mix-token": ([(2, B, T), *[(B, T, D)] * 2], lambda w, *v: ops.mix(w, v)),
    "mix-lane": ([(3, 2, B, T), *[(B, T, D)] * 2], lambda w, *v: ops.mix(w, v)),
    "remix": ([(B, T, 3, 4), (B, T, 3, D)], ops.remix),
    "remix-onto": ([(B, T, 1, 4), (B, T, 1, D), (B, T, 4, D)], lambda w, H, onto: ops.remix(w, H, onto=onto)),
    "remix-read": ([(B, T, 3), (B, T, 3, 4), (B, T, 3, D)], both_mixtures),
    "normed_project": ([(B, T, D), (D, 7), (7,)], lambda *given: ops.normed_project(*given, eps=1e-6)),
    "normed_project-layer": (
        [(B, T, D), (D, 7), (7,)],
        lambda *given: ops.normed_project(*given, eps=1e-6, centered=True),
    ),
    "compress": ([(3, D), (B, T, 3, D)], ops.compress),
    "delta_write": (
        [(B, T, 2, D), (B, T, D), (B, T, 2), (B, T)],
        lambda X, k, value, beta: ops.delta_write(X, k, value, beta, eps=0.5),
    ),
    "sinkhorn": ([(B, T, 4, 4)], lambda logits: ops.sinkhorn(logits, iterations=6)),
    "shortconv": ([(B, T, D), (B, 2, D), (3, D)], ops.shortconv),
    "conv_tail": ([(B, T, D), (B, 2, D)], ops.conv_tail),
    "rms_norm": ([(B, T, D)], lambda x: ops.rms_norm(x, 1e-6)),
    "rms_norm-gain": ([(B, T, D), (D,)], lambda x, gain: ops.rms_norm(x, 1e-6, gain)),
    "swiglu": ([(B, T, D)] * 2, ops.swiglu),
    "project": ([(B, T, D), (7, D)], ops.project),
    "gated_mlp": ([(B, T, D), (7, D), (7, D), (3, 7)], ops.gated_mlp),
    "token_attend": ([(B, T, D)] * 3, lambda q, k, v: ops.token_attend(q, k, v, TURNS, width=4)),
    "unembed_loss": (
        [(B * T, D), (7, D)],
        lambda x, w: ops.unembed_loss(x, w, torch.arange(B * T) % 8 - 1, ignored=-1)[None],
    ),
    "l2_norm": ([(B, T, D)], lambda x: ops.l2_norm(x, 1e-6)),
    "layer_norm": ([(B, T, D)], lambda x: ops.layer_norm(x, 1e-6)),
    "window_attend": window(),
    "window_attend-narrow": window((2, 4, 9, 2), rotary=1e4),
    "window_attend-one": window((2, 2, 9, 1)),
    "window_attend-local": window(mode="local", window=8),
    "window_attend-encoder": window(causal=False),
    "window_attend-shared": (
        [(2, 4, 40, 6), (2, 2, 40, 6), (2, 2, 40, 6), (4, 3)],
        lambda q, k, v, bias: ops.window_attend(q, k, v, window=3, bias=bias),
    ),
    "window_attend-along": ([(B, 40, D)] * 3, lambda q, k, v: ops.window_attend(q, k, v, window=3, axis=1, heads=2)),
    "window_attend-depth": ([(7, B, 3, D)] * 3, lambda q, k, v: ops.window_attend(q, k, v, window=3, axis=0, heads=2)),
}
"""The shapes of the arguments, and the op on them."""

GROUPED = {
    f"groups-{heads}": ([(2, D), (2,), *[(B, T, D)] * 3], groups(heads), by_single_reads(heads)) for heads in (1, 2)
}
"""Reads in groups, and the same read by read."""


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random arguments, the same at every call."""
    generator = torch.Generator().manual_seed(11)
    return [(0.5 + torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]
