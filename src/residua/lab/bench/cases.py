"""What is measured: an op at a shape, as named forms over the same inputs, each giving an output to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua import ops
from residua.lab.bench import forms

OURS, PUBLIC, PLAIN, COMPILED = "residua", "public", "pytorch", "compiled"
"""The four forms. The public form is the one every ratio's name speaks of; the others keep it honest."""


@dataclass(frozen=True)
class OpCase:
    """One op at one shape: `forms[name]()` gives an output, differentiable in `inputs[name]`."""

    op: str
    shape: dict[str, Any]
    forms: dict[str, Callable[[], Tensor]]
    inputs: dict[str, list[Tensor]]
    unit: int
    """Bytes of one source."""
    traffic: tuple[float, float] = (0.0, 0.0)
    """The least bytes that a forward and a backward can move, in units; zero where no bound is stated."""
    same: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """How a form's output is brought to the shape of ours, to check that both compute the same."""

    def label(self) -> str:
        """Such as `attend 2048x256 n=24 float32`."""
        rest = " ".join(f"{k}={v}" for k, v in self.shape.items() if k not in ("tokens", "width", "dtype"))
        return f"{self.op} {self.shape['tokens']}x{self.shape['width']} {rest} {self.shape['dtype']}".replace("  ", " ")

    def forward(self, form: str) -> Callable[[], Any]:
        """The form without a graph."""

        def run() -> None:
            with torch.no_grad():
                self.forms[form]()

        return run

    def both(self, form: str) -> Callable[[], Any]:
        """Forward and backward, the gradient of every input."""
        slope = torch.randn(
            self.forms[form]().shape, generator=torch.Generator().manual_seed(5), dtype=torch.float32
        ).to(self.inputs[form][0].dtype)
        return lambda: torch.autograd.grad(self.forms[form](), self.inputs[form], slope)


class Shapes:
    """Inputs by name, the same at every run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0) -> Tensor:
        drawn = scale * torch.randn(size, generator=self.generator)
        return drawn.to(self.dtype).requires_grad_()


def _rows(tokens: int) -> tuple[int, int]:
    return (8, tokens // 8) if tokens % 8 == 0 else (1, tokens)


def attend(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """One full depth read."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    sources = [make.normal(b, t, width, scale=1.0 + i % 3) for i in range(n)]
    query = make.normal(width, scale=0.1)
    buffer = torch.stack([v.detach().flatten(0, 1) for v in sources]).requires_grad_()
    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ops.attend(query, tuple(sources), eps=forms.EPS),
        PUBLIC: lambda: forms.public_read(query, sources),
        PLAIN: lambda: forms.buffered_read(query, buffer),
    }
    inputs = {OURS: [query, *sources], PUBLIC: [query, *sources], PLAIN: [query, buffer]}
    if compile:
        fused = forms.compiled(forms.listed_read)
        named[COMPILED], inputs[COMPILED] = (lambda: fused(query, *sources)), [query, *sources]
    shape = {"tokens": tokens, "width": width, "n": n, "dtype": _name(dtype)}
    return OpCase(
        "attend", shape, named, inputs, tokens * width * dtype.itemsize, (n + 1.0, 2 * n + 1.0),
        {PLAIN: lambda y: y.view(b, t, width)},
    )  # fmt: skip


def mix(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool, lanes: int = 0) -> OpCase:
    """A static mixture, or one a token in each of `lanes`."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    sources = [make.normal(b, t, width) for _ in range(n)]
    weights = make.normal(lanes, n, b, t) if lanes else make.normal(n)
    buffer = torch.stack([v.detach().flatten(0, 1) for v in sources]).requires_grad_()
    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ops.mix(weights, tuple(sources)),
        PUBLIC: lambda: forms.public_mix(weights, sources),
        PLAIN: lambda: forms.buffered_mix(weights, buffer),
    }
    inputs = {OURS: [weights, *sources], PUBLIC: [weights, *sources], PLAIN: [weights, buffer]}
    if compile:
        fused = forms.compiled(forms.listed_mix)
        named[COMPILED], inputs[COMPILED] = (lambda: fused(weights, *sources)), [weights, *sources]
    shape = {"tokens": tokens, "width": width, "n": n, "lanes": lanes, "dtype": _name(dtype)}
    out = max(lanes, 1)
    return OpCase(
        "mix", shape, named, inputs, tokens * width * dtype.itemsize, (n + out, 2.0 * n + out),
        {PLAIN: lambda y: y.view(*((lanes,) if lanes else ()), b, t, width)},
    )  # fmt: skip


def delta_write(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """The rank-one write, `n` value channels."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    X, k, value, beta = make.normal(b, t, n, width), make.normal(b, t, width), make.normal(b, t, n), make.normal(b, t)
    turned = X.detach().transpose(-1, -2).contiguous().requires_grad_()
    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ops.delta_write(X, k, value, beta, eps=forms.EPS),
        PUBLIC: lambda: forms.public_delta_write(turned, k, value, beta),
        PLAIN: lambda: forms.rowwise_delta_write(X, k, value, beta),
    }
    inputs = {OURS: [X, k, value, beta], PUBLIC: [turned, k, value, beta], PLAIN: [X, k, value, beta]}
    if compile:
        fused = forms.compiled(forms.rowwise_delta_write)
        named[COMPILED], inputs[COMPILED] = (lambda: fused(X, k, value, beta)), [X, k, value, beta]
    shape = {"tokens": tokens, "width": width, "values": n, "dtype": _name(dtype)}
    return OpCase(
        "delta_write", shape, named, inputs, tokens * width * dtype.itemsize, (2.0 * n + 1, 3.0 * n + 2),
        {PUBLIC: lambda y: y.transpose(-1, -2)},
    )  # fmt: skip


def remix(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """Hyper-Connections: `n` streams to `n` streams."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    weights, H = make.normal(b, t, n, n), make.normal(b, t, n, width)
    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ops.remix(weights, H),
        PUBLIC: lambda: forms.public_remix(weights, H),
        PLAIN: lambda: forms.matmul_remix(weights, H),
    }
    if compile:
        fused = forms.compiled(forms.public_remix)
        named[COMPILED] = lambda: fused(weights, H)
    inputs = {form: [weights, H] for form in named}
    shape = {"tokens": tokens, "width": width, "streams": n, "dtype": _name(dtype)}
    return OpCase("remix", shape, named, inputs, tokens * width * dtype.itemsize, (2.0 * n, 3.0 * n))


def window_attend(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """Causal attention in a window of `n` tokens, one row, heads of 64."""
    make, heads = Shapes(dtype), max(1, width // 64)
    q, k, v = (make.normal(1, heads, tokens, width // heads) for _ in range(3))
    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ops.window_attend(q, k, v, window=n),
        PUBLIC: lambda: forms.masked_window(q, k, v, n),
    }
    if tokens % n == 0:
        named[PLAIN] = lambda: forms.chunked_window(q, k, v, n)
    if compile:
        fused = forms.compiled(partial(forms.masked_window, window=n))
        named[COMPILED] = lambda: fused(q, k, v)
    inputs = {form: [q, k, v] for form in named}
    shape = {"tokens": tokens, "width": width, "window": n, "dtype": _name(dtype)}
    return OpCase("window_attend", shape, named, inputs, tokens * width * dtype.itemsize)


OPS: dict[str, Callable[..., OpCase]] = {
    "attend": attend, "mix": mix, "mix_lanes": partial(mix, lanes=4), "delta_write": delta_write,
    "remix": remix, "window_attend": window_attend,
}  # fmt: skip

GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "attend": {"shapes": ("2048x256", "4096x512"), "n": (4, 8, 16, 24, 32, 64)},
    "mix": {"shapes": ("2048x256",), "n": (8, 24)},
    "mix_lanes": {"shapes": ("2048x256",), "n": (8, 24)},
    "delta_write": {"shapes": ("2048x256",), "n": (1, 4)},
    "remix": {"shapes": ("2048x256",), "n": (4,)},
    "window_attend": {"shapes": ("1024x256", "2048x256", "4096x256", "8192x256"), "n": (128,)},
}
"""The shapes (tokens x width) and counts that a full run measures."""


def cases(
    op: str, shapes: Sequence[str] | None, counts: Sequence[int] | None, dtype: torch.dtype, compile: bool
) -> Iterator[OpCase]:
    """The cases of one op; None takes the full grid."""
    if op not in OPS:
        raise ValueError(f"no op {op!r} to measure; there are {', '.join(OPS)}")
    for shape in shapes or GRIDS[op]["shapes"]:
        tokens, width = parse_shape(shape)
        for n in counts or GRIDS[op]["n"]:
            yield OPS[op](tokens, width, n, dtype, compile=compile)


def parse_shape(text: str) -> tuple[int, int]:
    """`2048x256` is 2048 tokens of width 256."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"a shape is TOKENSxWIDTH, such as 2048x256, not {text!r}")
    return int(parts[0]), int(parts[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
