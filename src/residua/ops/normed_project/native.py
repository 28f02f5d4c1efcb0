"""`normed_project` in C: rows are normalised a few at a time, in the cache; only references are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.native.guard import Kernel, dense, empties, only_torch, require
from residua.native.library import call
from residua.ops._backend import kernel
from residua.ops._operator import Operator
from residua.ops.norm import accumulator
from residua.ops.normed_project import reference


@kernel("normed_project", "cpu", "cpu")
def normed_project(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, centered: bool = False) -> Tensor:
    """The kernel, of the type to add up in."""
    if only_torch(x, weight, bias):
        return reference.normed_project(x, weight, bias, eps=eps, centered=centered)
    inputs = tuple(one.to(accumulator(x.dtype)) for one in (x, weight, bias))
    require(*inputs)
    if weight.shape != (x.shape[-1], len(bias)):
        raise ValueError(
            f"normed_project of {tuple(x.shape)} takes a weight [{x.shape[-1]} c] and a bias [c], not "
            f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    return NORMED_PROJECT(inputs, eps, centered)


def _sizes(x: Tensor, weight: Tensor, centered: bool) -> tuple[int, int, int, int]:
    """Rows, their width, columns of the result, and which norm."""
    width, columns = weight.shape
    return x.numel() // width, width, columns, int(centered)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, centered: bool) -> Tensor:
    out = torch.empty((*x.shape[:-1], len(bias)), dtype=x.dtype, device="cpu")
    if out.numel():
        numbers, tensors = x.numel() * len(bias), (dense(x), dense(weight), dense(bias), out)
        call("residua_normed_project", x.dtype, numbers, tensors, _sizes(x, weight, centered), eps)
    return out


def _backward(
    inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor, eps: float, centered: bool
) -> list[Tensor | None]:
    x, weight, bias = inputs
    found = empties(inputs, wanted)
    if not gradient.numel():
        return [None if one is None else one.zero_() for one in found]
    numbers, tensors = 2 * x.numel() * len(bias), (dense(x), dense(weight), dense(gradient, x.dtype), *found)
    call("residua_normed_project_backward", x.dtype, numbers, tensors, _sizes(x, weight, centered), eps)
    return found


def _reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, centered: bool) -> Tensor:
    return reference.normed_project(x, weight, bias, eps=eps, centered=centered)


NORMED_PROJECT = Operator(
    "normed_project",
    "Tensor x, Tensor weight, Tensor bias, float eps, bool centered",
    Kernel(_forward, _backward, _reference),
    fake=lambda x, weight, bias, eps, centered: x.new_empty((*x.shape[:-1], weight.shape[-1])),
)
