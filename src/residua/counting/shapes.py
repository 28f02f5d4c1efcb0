"""The result of a function as an empty tensor of the right shape, type and layout.

PyTorch can run all of these on the meta device, but in Python, through several layers and 0.1 to 3 ms each; a model of
billions of parameters calls ten thousand of them. What is not in the table is run there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from residua.counting.rules import Arguments, Function, Keywords, letters, tensors

_BROADCAST = (
    "add", "sub", "__rsub__", "neg", "abs", "maximum", "minimum", "mul", "div", "square", "pow", "__rpow__",
    "clamp_min", "clamp", "relu", "cos", "sin", "log", "erf", "rsqrt", "sqrt", "exp", "sigmoid", "tanh", "reciprocal",
    "silu", "gelu", "softmax", "rms_norm", "layer_norm", "where", "masked_fill", "ones_like", "zeros_like",
    "floor_divide", "__floordiv__", "remainder",
)  # fmt: skip
_COMPARE = ("lt", "le", "ge", "gt", "eq", "ne", "__eq__", "__ne__", "__and__", "__or__", "__invert__")
_REDUCE = ("sum", "mean", "logsumexp", "amax")


def made(name: str, func: Function, args: Arguments, kwargs: Keywords) -> object:
    """What `func` returns, without its numbers."""
    make = MAKES.get(name)
    out = None if make is None else make(*args, **kwargs)
    if out is None:
        return func(*args, **kwargs)
    inputs = tensors((args, tuple(kwargs.values())))
    learns = torch.is_grad_enabled() and out.is_floating_point() and any(one.requires_grad for one in inputs)
    return out.requires_grad_(learns)


@contextmanager
def unfilled() -> Iterator[None]:
    """Models that are only looked at are built on the meta device, and their parameters are not filled.

    Filling them there would import torch's compiler first, which takes more than a second.
    """
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """What fills a tensor of the meta device does nothing: there is nothing to put numbers in."""

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs, name = kwargs or {}, func.__name__
        if name in _FILLS:
            return tensors((args, tuple(kwargs.values())))[0]
        return _eye(*args, **kwargs) if name == "eye" else func(*args, **kwargs)


_FILLS = frozenset(
    ("__setitem__", "fill_", "zero_", "normal_", "uniform_", "copy_", "fill_diagonal_", "trunc_normal_", "mul_",
     "kaiming_uniform_", "xavier_uniform_", "ones_", "zeros_", "constant_", "orthogonal_")
)  # fmt: skip


def _broadcast(*args: object, dtype: torch.dtype | None = None, **kwargs: object) -> Tensor:
    """Shaped like its largest argument, and laid out like it too."""
    inputs = tensors((args, tuple(kwargs.values())))
    shape = _common_shape(inputs)
    numbers = [one for one in inputs if one.dtype is not torch.bool] or inputs
    dtype = dtype or reduce(torch.promote_types, (one.dtype for one in numbers))
    if not dtype.is_floating_point and any(isinstance(one, float) for one in args):
        dtype = torch.get_default_dtype()
    like = next((one for one in inputs if one.shape == shape), None)
    return _empty(shape, dtype) if like is None else _empty_like(like, dtype)


def _common_shape(inputs: list[Tensor]) -> torch.Size:
    first = inputs[0].shape
    if all(one.shape == first for one in inputs):
        return first
    most = max(one.ndim for one in inputs)
    padded = [(1,) * (most - one.ndim) + tuple(one.shape) for one in inputs]
    return torch.Size(max(sizes) for sizes in zip(*padded, strict=True))


def _empty(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The axes in the same order in memory; an expanded one is written out."""
    if x.is_contiguous() or 0 in x.stride():
        return _empty(x.shape, dtype or x.dtype)
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    return _empty([x.shape[axis] for axis in order], dtype or x.dtype).permute(
        [order.index(axis) for axis in range(x.ndim)]
    )


def _compare(*args: object, **kwargs: object) -> Tensor:
    return _broadcast(*args, dtype=torch.bool, **kwargs)


def _reduce(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **others: object,
) -> Tensor:
    axes = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis % x.ndim for axis in axes}
    shape = [1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdim or axis not in gone]
    return _empty(shape, dtype or x.dtype)


def _stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape.insert(dim % (len(shape) + 1), len(parts))
    return _empty(shape, parts[0].dtype)


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape, dim = list(parts[0].shape), dim % parts[0].ndim
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _empty(shape, parts[0].dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _empty((*x.shape[:-1], weight.shape[0]), x.dtype)


def _matmul(left: Tensor, right: Tensor) -> Tensor | None:
    if right.ndim > 2:
        return None
    return _empty((*left.shape[:-1], *right.shape[1:]), left.dtype)


def _einsum(pattern: str, *operands: Tensor) -> Tensor:
    sizes = letters(pattern, operands)
    return _empty([sizes[letter] for letter in pattern.split("->")[1].strip()], operands[0].dtype)


def _embedding(ids: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    return _empty((*ids.shape, weight.shape[1]), weight.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Laid out like the queries, as the kernel does it."""
    return _empty_like(q)


def _arange(
    start: float, end: float | None = None, step: float = 1, *, dtype: torch.dtype | None = None, **others: object
) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    whole = all(isinstance(one, int) for one in (first, last, step))
    kind = dtype or (torch.int64 if whole else torch.get_default_dtype())
    return _empty((max(0, math.ceil((last - first) / step)),), kind)


def _eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, **others: object) -> Tensor:
    return _empty((rows, columns or rows), dtype)


MAKES: dict[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys(_COMPARE, _compare),
    **dict.fromkeys(_REDUCE, _reduce),
    "stack": _stack,
    "cat": _cat,
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "arange": _arange,
    "eye": _eye,
}
