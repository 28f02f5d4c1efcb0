"""Every Triton kernel against the definition of its op in float64, on a device: the output and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from residua import ops
from residua.lab.bench.timing import Measured
from residua.lab.gpu.cases import CASES, KernelCase, Outputs
from residua.testing import TOLERANCE, error

SHAPES = ((37, 96, 5), (9, 768, 3), (3, 4096, 2))
"""Tokens, width and sources: none a power of two, one as wide as models are."""


def require(name: str) -> torch.device:
    """The device of that name; one line where it is not there."""
    device = torch.device(name)
    if device.type != "cuda":
        raise ValueError(f"--device {name}: kernels for other devices are in Triton, for cuda (or leave out --device)")
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "finds no GPU"
        raise ValueError(f"--device {name}: there is no such device here: torch {torch.__version__} {built}")
    return device


def check(
    device: torch.device, shapes: Sequence[tuple[int, int, int]] = SHAPES, cases: Iterable[KernelCase] = CASES
) -> list[Measured]:
    """A row for every case, type and shape: the largest error of an output and of a gradient, and what is allowed."""
    return [
        _row(case, dtype, shape, device) for case in cases for dtype in case.types for shape in shapes
    ]  # fmt: skip


def failed(rows: Iterable[Measured]) -> list[str]:
    """What is wrong, a line each."""
    return [f"{row['case']} {row['dtype']} {row['shape']}: {row['reason']}" for row in rows if row["reason"]]


def _row(case: KernelCase, dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> Measured:
    given = case.draw(*shape, dtype, device)
    row: Measured = {
        "case": case.name, "dtype": str(dtype).removeprefix("torch."), "shape": "x".join(map(str, shape)),
        "output": None, "gradient": None, "reason": "",
    }  # fmt: skip
    exact, slopes = _results("reference", case.plain or case.run, case.graded, [one.double() for one in given], None)
    try:
        found, gradients = _results("triton", case.run, case.graded, given, exact)
    except Exception as refused:  # what a driver, a compiler or a kernel says belongs into the report
        return row | {"reason": f"{type(refused).__name__}: {refused}".splitlines()[0][:300]}
    for what, allowed_at, pairs in (("output", 0, (found, exact)), ("gradient", 1, (gradients, slopes))):
        for got, true in zip(*pairs, strict=True):
            if not true.numel():
                continue
            miss, allowed = error(got, true), TOLERANCE[got.dtype][allowed_at]
            row[what] = max(row[what] or 0.0, miss)
            if not miss <= allowed:
                row["reason"] = f"{what} is off by {miss:.2g}, allowed {allowed:.2g}"
    return row


def _results(
    backend: str, run: Callable[..., Outputs], graded: bool, given: Sequence[Tensor], along: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and the gradients; slopes lean towards `along`, so that sums over tokens do not cancel."""
    leaves = [one.detach().clone().requires_grad_(graded) for one in given]
    with ExitStack() as stack:
        stack.enter_context(ops.backend(backend, strict=True))
        stack.enter_context(torch.set_grad_enabled(graded))
        made = run(*leaves)
        outs = list(made) if isinstance(made, tuple) else [made]
        if not graded:
            return outs, []
        generator = torch.Generator().manual_seed(9)
        slopes = [
            (torch.randn(one.shape, generator=generator).to(one.device) + lean.detach()).bfloat16().to(one.dtype)
            for one, lean in zip(outs, along or outs, strict=True)
        ]
        return outs, list(torch.autograd.grad(outs, leaves, slopes))
