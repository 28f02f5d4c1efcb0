"""What is measured: an op at a shape, as named forms over the same inputs, each giving an output to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from residua import ops
from residua.lab.bench import forms
from residua.lab.bench.device import current
from residua.lab.bench.timing import Form

OURS, PUBLIC, PLAIN, COMPILED = "residua", "public", "pytorch", "compiled"
"""The four forms. The public form is the one every ratio's name speaks of; the others keep it honest."""


@dataclass(frozen=True)
class OpCase:
    """One op at one shape: `forms[name]()` gives an output, differentiable in `inputs[name]`."""

    op: str
    shape: dict[str, int | str]
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

    def forward(self, form: str) -> Form:
        """The form without a graph."""

        def run() -> None:
            with torch.no_grad():
                self.forms[form]()

        return run

    def both(self, form: str) -> Form:
        """Forward and backward, the gradient of every input."""
        slope = torch.randn(
            self.forms[form]().shape, generator=torch.Generator().manual_seed(5), dtype=torch.float32
        ).to(self.inputs[form][0])
        return lambda: torch.autograd.grad(self.forms[form](), self.inputs[form], slope)


class Shapes:
    """Inputs by name, the same at every run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0) -> Tensor:
        drawn = scale * torch.randn(size, generator=self.generator)
        return drawn.to(current(), self.dtype).requires_grad_()


def _rows(tokens: int) -> tuple[int, int]:
    return (8, tokens // 8) if tokens % 8 == 0 else (1, tokens)


Named = dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]]
"""A form's name, the form, and the inputs that it takes and is differentiated in."""


def _case(
    op: str,
    shape: dict[str, int],
    dtype: torch.dtype,
    named: Named,
    compiled: Callable[..., Tensor] | None,
    traffic: tuple[float, float] = (0.0, 0.0),
    same: dict[str, Callable[[Tensor], Tensor]] | None = None,
) -> OpCase:
    """The forms over their inputs; the one to be compiled takes the inputs of ours."""
    if compiled is not None:
        named[COMPILED] = forms.compiled(compiled), named[OURS][1]
    return OpCase(
        op,
        {**shape, "dtype": str(dtype).removeprefix("torch.")},
        {name: partial(form, *inputs) for name, (form, inputs) in named.items()},
        {name: list(inputs) for name, (_, inputs) in named.items()},
        shape["tokens"] * shape["width"] * dtype.itemsize,
        traffic,
        same or {},
    )


def attend(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """One full depth read."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    sources = [make.normal(b, t, width, scale=1.0 + i % 3) for i in range(n)]
    query = make.normal(width, scale=0.1)
    named: Named = {
        OURS: (lambda query, *sources: ops.attend(query, sources, eps=forms.EPS), (query, *sources)),
        PUBLIC: (lambda query, *sources: forms.public_read(query, sources), (query, *sources)),
        PLAIN: (forms.buffered_read, (query, _buffer(sources))),
    }
    shape = {"tokens": tokens, "width": width, "n": n}
    return _case(
        "attend", shape, dtype, named, forms.listed_read if compile else None, (n + 1.0, 2 * n + 1.0),
        {PLAIN: lambda y: y.view(b, t, width)},
    )  # fmt: skip


def mix(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool, lanes: int = 0) -> OpCase:
    """A static mixture, or one a token in each of `lanes`."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    sources = [make.normal(b, t, width) for _ in range(n)]
    weights = make.normal(lanes, n, b, t) if lanes else make.normal(n)
    named: Named = {
        OURS: (lambda weights, *sources: ops.mix(weights, sources), (weights, *sources)),
        PUBLIC: (lambda weights, *sources: forms.public_mix(weights, sources), (weights, *sources)),
        PLAIN: (forms.buffered_mix, (weights, _buffer(sources))),
    }
    shape = {"tokens": tokens, "width": width, "n": n, "lanes": lanes}
    out = max(lanes, 1)
    return _case(
        "mix", shape, dtype, named, forms.listed_mix if compile else None, (n + out, 2.0 * n + out),
        {PLAIN: lambda y: y.view(*((lanes,) if lanes else ()), b, t, width)},
    )  # fmt: skip


def delta_write(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """The rank-one write, `n` value channels."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    X, *rest = make.normal(b, t, n, width), make.normal(b, t, width), make.normal(b, t, n), make.normal(b, t)
    turned = X.detach().transpose(-1, -2).contiguous().requires_grad_()
    named: Named = {
        OURS: (partial(ops.delta_write, eps=forms.EPS), (X, *rest)),
        PUBLIC: (forms.public_delta_write, (turned, *rest)),
        PLAIN: (forms.rowwise_delta_write, (X, *rest)),
    }
    shape = {"tokens": tokens, "width": width, "values": n}
    return _case(
        "delta_write", shape, dtype, named, forms.rowwise_delta_write if compile else None, (2.0 * n + 1, 3.0 * n + 2),
        {PUBLIC: lambda y: y.transpose(-1, -2)},
    )  # fmt: skip


def remix(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """Hyper-Connections: `n` streams to `n` streams."""
    make, (b, t) = Shapes(dtype), _rows(tokens)
    inputs = make.normal(b, t, n, n), make.normal(b, t, n, width)
    named: Named = {
        OURS: (ops.remix, inputs),
        PUBLIC: (forms.public_remix, inputs),
        PLAIN: (forms.matmul_remix, inputs),
    }
    shape = {"tokens": tokens, "width": width, "streams": n}
    return _case("remix", shape, dtype, named, forms.public_remix if compile else None, (2.0 * n, 3.0 * n))


def window_attend(tokens: int, width: int, n: int, dtype: torch.dtype, *, compile: bool) -> OpCase:
    """Causal attention in a window of `n` tokens, one row, heads of 64."""
    make, heads = Shapes(dtype), max(1, width // 64)
    inputs = [make.normal(1, heads, tokens, width // heads) for _ in range(3)]
    masked = partial(forms.masked_window, window=n)
    named: Named = {OURS: (partial(ops.window_attend, window=n), inputs), PUBLIC: (masked, inputs)}
    if tokens % n == 0:
        named[PLAIN] = partial(forms.chunked_window, window=n), inputs
    shape = {"tokens": tokens, "width": width, "window": n}
    return _case("window_attend", shape, dtype, named, masked if compile else None)


def _buffer(sources: Sequence[Tensor]) -> Tensor:
    """The sources as one tensor, [n, tokens, d]."""
    return torch.stack([v.detach().flatten(0, 1) for v in sources]).requires_grad_()


OPS: dict[str, Callable[..., OpCase]] = {
    "attend": attend, "mix": mix, "mix_lanes": partial(mix, lanes=4), "delta_write": delta_write,
    "remix": remix, "window_attend": window_attend,
}  # fmt: skip

GRIDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "attend": (("2048x256", "4096x512"), (4, 8, 16, 24, 32, 64)),
    "mix": (("2048x256",), (8, 24)),
    "mix_lanes": (("2048x256",), (8, 24)),
    "delta_write": (("2048x256",), (1, 4)),
    "remix": (("2048x256",), (4,)),
    "window_attend": (("1024x256", "2048x256", "4096x256", "8192x256"), (128,)),
}
"""The shapes (tokens x width) and counts that a full run measures."""

COMPILED_COUNTS = (1, 4, 24, 128)
"""Counts, one of every op at least, of which a full run has a compiled form: it takes longer to make than the others to
measure."""


def compiles(op: str, tokens: int, n: int) -> bool:
    """Whether a full run compiles this case; of long windows it would be PyTorch's attention again."""
    return n in COMPILED_COUNTS and not (op == "window_attend" and tokens > 2048)


def cases(
    op: str, shapes: Sequence[str] | None, counts: Sequence[int] | None, dtype: torch.dtype, compile: bool | None
) -> Iterator[OpCase]:
    """The cases of one op; None takes the full grid, and compiles what a full run does."""
    if op not in OPS:
        raise ValueError(f"no op {op!r} to measure; there are {', '.join(OPS)}")
    for shape in shapes or GRIDS[op][0]:
        tokens, width = parse_shape(shape)
        for n in counts or GRIDS[op][1]:
            wanted = compiles(op, tokens, n) if compile is None else compile
            yield OPS[op](tokens, width, n, dtype, compile=wanted)


def parse_shape(text: str) -> tuple[int, int]:
    """`2048x256` is 2048 tokens of width 256."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"a shape is TOKENSxWIDTH, such as 2048x256, not {text!r}")
    return int(parts[0]), int(parts[1])
