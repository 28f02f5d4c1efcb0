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
from residua.ops.window_attend.position import rotations

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
    made: bool = False
    """Whether gradients are made with the answer and kept until they are asked for."""

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


def turned(heads: int, shared: int, **options: Any) -> Callable[..., Tensor]:
    """Attention over tokens, with rotations where the width of a head is even."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = q.shape[-1] // heads
        assert k.shape[-1] == shared * width
        wide = torch.promote_types(q.dtype, torch.float32)
        turns = rotations(torch.arange(q.shape[1]), width, 100.0, wide) if width % 2 == 0 else None
        return ops.token_attend(q, k, v, turns, width=width, **options)

    return call


def two(tokens: int) -> int:
    """One token attends to itself alone, and the gradients of q and k are nothing but rounding."""
    return 2 if tokens == 1 else tokens


def loss(x: Tensor, weight: Tensor) -> Tensor:
    """Every third row does not count. Logits of some units, whatever the width: of large ones their rounding shows."""
    rows, weight = torch.arange(len(x)), weight * 0.5 ** (x.shape[-1].bit_length() - 2)
    return ops.unembed_loss(x, weight, torch.where(rows % 3 == 1, -100, rows * 7 % len(weight)))


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
    *(
        Op(
            f"remix-onto-{s}-{m}",
            lambda b, t, d, s=s, m=m: [(b, t, s, m), (b, t, s, d), (b, t, m, d)],
            lambda weights, H, onto: ops.remix(weights, H, onto=onto),
        )
        for s, m in ((1, 4), (3, 6), (6, 2))
    ),
    Op(
        "read_remix",
        lambda b, t, d: [(b, t, 4), (b, t, 4, 5), (b, t, 4, d)],
        lambda read, weights, H: ops.read_remix(read, weights, H),
    ),
    Op(
        "read_remix-turned",  # weights that were made for the other order, and lie beside others
        lambda b, t, d: [(b, t, 3), (b, t, 7, 3), (b, t, 3, d)],
        lambda read, weights, H: ops.read_remix(read, weights[..., 1:, :].transpose(-1, -2), H),
    ),
    *(
        Op(
            f"normed_project-{'layer' if centered else 'rms'}",
            lambda b, t, d, c=c: [(b, t, d), (d, c), (c,)],
            lambda x, weight, bias, centered=centered: ops.normed_project(x, weight, bias, eps=0.5, centered=centered),
            wide=True,
        )
        for centered, c in ((False, 24), (True, 6))
    ),
    Op("compress", lambda b, t, d: [(4, d), (b, t, 4, d)], ops.compress),
    Op("sinkhorn", lambda b, t, d: [(b, t, 4, 4)], lambda logits: ops.sinkhorn(logits, iterations=8), wide=True),
    Op("shortconv", lambda b, t, d: [(b, t, d), (b, 3, d), (4, d)], ops.shortconv),
    Op("shortconv-channels", lambda b, t, d: [(b, t, 2, d), (b, 1, 2, d), (2, 2, d)], ops.shortconv),
    Op("shortconv-one", lambda b, t, d: [(b, t, d), (b, 0, d), (1, d)], ops.shortconv),
    Op("rms_norm", lambda b, t, d: [(b, t, d)], lambda x: ops.rms_norm(x, 1e-3)),
    Op("rms_norm-gain", lambda b, t, d: [(b, t, d), (d,)], lambda x, gain: ops.rms_norm(x, 1e-3, gain)),
    Op("swiglu", lambda b, t, d: [(b, t, d)] * 2, ops.swiglu),
    Op("token_attend", lambda b, t, d: [(b, two(t), 2 * (d % 48 or 48))] * 3, turned(2, 2)),
    Op("token_attend-shared", lambda b, t, d: [(b, two(t), 24), *[(b, two(t), 12)] * 2], turned(4, 2)),
    Op("token_attend-encoder", lambda b, t, d: [(b, two(t), 6)] * 3, turned(1, 1, causal=False)),
    Op("unembed_loss", lambda b, t, d: [(b * t, d), (11, d)], loss, wide=True, made=True),
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
