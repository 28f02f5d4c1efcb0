"""Every op that has a Triton kernel, as data: what to draw, what to call, and which of its inputs have gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residua import ops
from residua.ops.attend import ahead, merge, together

Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One op at some options: `run(*inputs)` for inputs of `shapes(tokens, width, n)`."""

    name: str
    op: str
    """Of `residua.ops.kernels()`."""
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]
    run: Callable[..., Outputs]
    graded: bool = True
    """Whether its kernels have a backward pass; all others are for inference."""
    wide: int = 0
    """How many of the inputs, counted from the first, are parameters: of the type to add up in."""
    plain: Callable[..., Outputs] | None = None
    """The same by ops that have a reference, where `run` has none."""
    types: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)

    def draw(
        self, tokens: int, width: int, n: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> list[Tensor]:
        """Inputs, the same at every call."""
        generator = torch.Generator().manual_seed(7)
        found = []
        for i, shape in enumerate(self.shapes(tokens, width, n)):
            values = torch.randn(shape, generator=generator)
            scale = width**-0.5 if i < self.wide and shape[-1:] == (width,) else 1.0
            kind = torch.promote_types(dtype, torch.float32) if i < self.wide else dtype
            # what bfloat16 can hold, so that every type is given the same
            found.append((scale * values).bfloat16().to(device, kind))
        return found


def _sources(parameters: list[tuple[int, ...]], n: int, tokens: int, width: int) -> list[tuple[int, ...]]:
    return [*parameters, *[(1, tokens, width)] * n]


def _reads(width: int) -> int:
    """Queries that fill a pass of the kernels, where rows are wide."""
    return 2 if width < 256 else max(2, 4096 // (1 << (width - 1).bit_length()))


def _read(**options: Any) -> Callable[..., Tensor]:
    return lambda query, *sources: ops.attend(query, sources, **options)


def _read_with_null(query: Tensor, null: Tensor, *sources: Tensor) -> Tensor:
    return ops.attend(query, sources, null=null, heads=4, total=True, centered=True)


def _groups(queries: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    """Begun over all sources but the last, and merged with it."""
    carries, same = ahead(queries, sources[:-1], eps=1e-6)
    every = zip(carries, queries.unbind(), strict=True)
    return *(merge(carry, query, sources[-1:], eps=1e-6) for carry, query in every), same[0]


def _one_by_one(queries: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    return *(ops.attend(query, sources) for query in queries.unbind()), sources[0]


def _together(queries: Tensor, gates: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    ones = [torch.ones_like(query) for query in queries.unbind()]
    return tuple(together(queries.unbind(), ones, sources, gates=gates.split(1), eps=1e-6))


def _gated(queries: Tensor, gates: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    return tuple(gate * ops.attend(query, sources) for query, gate in zip(queries.unbind(), gates, strict=True))


def _attention(query: Tensor, *rest: Tensor) -> Tensor:
    return ops.attend_qkv(query, rest[: len(rest) // 2], rest[len(rest) // 2 :], heads=4)


def _mix(weights: Tensor, *sources: Tensor) -> Tensor:
    return ops.mix(weights, sources)


def _mixture(name: str, weights: Callable[[int, int, int], tuple[int, ...]]) -> KernelCase:
    return KernelCase(f"mix, {name}", "mix", lambda t, d, n: _sources([weights(t, d, n)], n, t, d), _mix, wide=1)


def _window(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: ops.window_attend(q, k, v, **options)


def _heads(most: int) -> Callable[[int, int, int], list[tuple[int, ...]]]:
    """Queries, keys and values in heads of at most so many numbers."""
    return lambda tokens, width, n: [(1, max(1, width // most), tokens, min(width, most))] * 3


CASES = (
    KernelCase("attend", "attend", lambda t, d, n: _sources([(d,)], n, t, d), _read(), wide=1),
    KernelCase(
        "attend, all options", "attend", lambda t, d, n: _sources([(d,), (1,)], n, t, d), _read_with_null, wide=2
    ),
    KernelCase(
        "attend_norm", "attend_norm", lambda t, d, n: _sources([(d,), (d,)], n, t, d),
        lambda query, gain, *sources: ops.attend_norm(query, sources, gain, norm_eps=1e-6), graded=False, wide=2,
    ),
    KernelCase(
        "attend_weights", "attend_weights", lambda t, d, n: _sources([(d,)], n, t, d),
        lambda query, *sources: ops.attend_weights(query, sources), graded=False, wide=1,
    ),
    KernelCase(
        "attend in groups", "attend_ahead", lambda t, d, n: _sources([(_reads(d), d)], n, t, d), _groups, wide=1,
        plain=_one_by_one,
    ),
    KernelCase(
        "attend together", "attend_together", lambda t, d, n: _sources([(_reads(d), d), (_reads(d),)], n, t, d),
        _together, graded=False, wide=2, plain=_gated,
    ),
    KernelCase("attend_qkv", "attend_qkv", lambda t, d, n: [(1, t, d)] * (1 + 2 * n), _attention),
    _mixture("static", lambda t, d, n: (n,)),
    _mixture("channel", lambda t, d, n: (n, d)),
    _mixture("token", lambda t, d, n: (n, 1, t)),
    _mixture("lanes", lambda t, d, n: (4, n, 1, t)),
    KernelCase("remix", "remix", lambda t, d, n: [(1, t, n, n), (1, t, n, d)], ops.remix, wide=1),
    KernelCase(
        "delta_write", "delta_write", lambda t, d, n: [(1, t, n, d), (1, t, d), (1, t, n), (1, t)],
        lambda X, k, value, beta: ops.delta_write(X, k, value, beta, eps=1e-3),
    ),
    KernelCase("shortconv", "shortconv", lambda t, d, n: [(1, t, d), (1, 3, d), (4, d)], ops.shortconv),
    KernelCase(
        "sinkhorn", "sinkhorn", lambda t, d, n: [(1, t, 4, 4)], lambda logits: ops.sinkhorn(logits, iterations=20),
        types=(torch.float32, torch.float64),
    ),
    KernelCase(
        "window_attend", "window_attend", _heads(128), _window(window=16), types=(torch.float32, torch.bfloat16)
    ),
    KernelCase("window_attend, encoder", "window_attend", _heads(64), _window(window=16, mode="local", causal=False)),
)  # fmt: skip
"""One or more for every op of `_triton_registry.SERVED`; merging is part of reading in groups."""
