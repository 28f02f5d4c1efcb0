"""The ops with kernels in C, as data: what to draw, what to call. Laws run over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.native import library

variants = pytest.mark.parametrize("instructions", library.runnable() if library.available() else ("portable",))
"""Every variant of the kernels that this processor can run."""


@dataclass(frozen=True)
class Op:
    """`call` on tensors of `shapes(rows, tokens, width)`."""

    name: str
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]
    call: Callable[..., Any]
    wide: bool = False
    """Whether the answer has the accumulation type even for narrower inputs."""

    def __str__(self) -> str:
        return self.name

    def draw(
        self, rows: int = 2, tokens: int = 3, width: int = 5, dtype: torch.dtype = torch.float64, grad: bool = False
    ) -> list[Tensor]:
        """Random arguments, the same at every call; with a mean, so that long sums do not cancel to nothing."""
        generator = torch.Generator().manual_seed(rows + 10 * tokens + 100 * width)
        shapes = self.shapes(rows, tokens, width)
        return [
            (0.5 + torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_(grad)
            for shape in shapes
        ]

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the op returns, as a tuple."""
        found = self.call(*inputs)
        return found if isinstance(found, tuple) else (found,)


def mix(name: str, weights: Callable[[int, int, int], tuple[int, ...]], sources: int) -> Op:
    """A kind of weights over so many sources."""
    return Op(name, lambda b, t, d: [weights(b, t, d), *[(b, t, d)] * sources], lambda w, *v: ops.mix(w, v))


OPS = [
    mix("mix-static", lambda b, t, d: (6,), 6),
    mix("mix-static-one", lambda b, t, d: (1,), 1),
    mix("mix-channel", lambda b, t, d: (5, d), 5),
    mix("mix-token", lambda b, t, d: (7, b, t), 7),
    mix("mix-broadcast", lambda b, t, d: (4, 1, 1), 4),
    mix("mix-lane", lambda b, t, d: (4, 5, b, t), 5),
    mix("mix-lanes", lambda b, t, d: (6, 2, b, t), 2),
    *(
        Op(
            f"delta_write-{v}",
            lambda b, t, d, v=v: [(b, t, v, d), (b, t, d), (b, t, v), (b, t)],
            lambda X, k, value, beta: ops.delta_write(X, k, value, beta, eps=0.5),
        )
        for v in (1, 4)
    ),
    Op("remix", lambda b, t, d: [(b, t, 4, 5), (b, t, 4, d)], ops.remix),
    Op("remix-one", lambda b, t, d: [(b, t, 3, 1), (b, t, 3, d)], ops.remix),
    Op("sinkhorn", lambda b, t, d: [(b, t, 4, 4)], lambda logits: ops.sinkhorn(logits, iterations=8), wide=True),
    Op("shortconv", lambda b, t, d: [(b, t, d), (b, 3, d), (4, d)], ops.shortconv),
    Op("shortconv-channels", lambda b, t, d: [(b, t, 2, d), (b, 1, 2, d), (2, 2, d)], ops.shortconv),
    Op("shortconv-one", lambda b, t, d: [(b, t, d), (b, 0, d), (1, d)], ops.shortconv),
]

SIZES = [(1, 1, 2), (4, 6, 1), (2, 3, 5), (1, 7, 8), (2, 5, 19), (1, 2, 96), (3, 1, 4100)]
"""rows, tokens, width: narrower than a vector, one vector, odd, whole vectors, wider than a tile."""


def gradients(op: Op, inputs: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """What the op returns, and the gradients of a fixed random projection of it."""
    outputs = op.run(*inputs)
    return outputs, torch.autograd.grad(outputs, inputs, projection(outputs), allow_unused=True)


def projection(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Random numbers for every output that are the same in every type."""
    generator = torch.Generator().manual_seed(7)
    return [(0.5 + torch.randn(one.shape, generator=generator)).bfloat16().to(one.dtype) for one in outputs]
