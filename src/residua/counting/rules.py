"""What one call of a PyTorch function costs, from the shapes of its arguments: operations, and what autograd keeps.

An addition, a multiplication and an elementary function (exp, rsqrt, sigmoid, ...) are one operation each. A rule is
written from the definition of its function; none is read off the operators that PyTorch happens to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
"""What torch hands to a mode, whose values can be anything."""


@dataclass(slots=True)
class Call:
    """A function as it was called, and what it returned."""

    name: str
    args: Arguments
    kwargs: Keywords
    out: object
    inputs: list[Tensor] = field(init=False)
    outputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs, self.outputs = tensors((self.args, tuple(self.kwargs.values()))), tensors((self.out,))

    @property
    def size(self) -> int:
        """Elements of the result."""
        return sum(out.numel() for out in self.outputs)

    @property
    def learns(self) -> bool:
        """Whether a gradient will flow back through it."""
        return any(out.requires_grad for out in self.outputs)


class Unseen(NamedTuple):
    """A tensor that a function makes for its own backward pass and returns to nobody."""

    nbytes: int


Kept = Iterable[Tensor | Unseen]


class Rule(NamedTuple):
    """The cost of a function."""

    flops: Callable[[Call], float]
    keeps: Callable[[Call], Kept]
    between: Callable[[Call], int] = lambda call: 0
    """Bytes that its steps hand to each other, beyond its inputs and outputs."""


def tensors(values: Iterable[object]) -> list[Tensor]:
    """Every tensor among the values, also inside tuples and lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors(value)
    return found


def rule_of(call: Call) -> Rule:
    """The rule for a call; a function without one is an error that names it."""
    try:
        return RULES[call.name]
    except KeyError:
        raise NotImplementedError(
            f"no cost is known for the function {call.name!r}; add its rule to residua/counting/rules.py"
        ) from None


def _nothing(call: Call) -> Kept:
    return ()


def _first(call: Call) -> Kept:
    return call.inputs[:1]


def _result(call: Call) -> Kept:
    return call.outputs


def _factors(call: Call) -> Kept:
    """d(ab) = b da + a db: a factor is kept for the gradient of the other."""
    factors = call.inputs
    if len(factors) < 2:
        return ()
    left, right = factors[:2]
    return [*([left] if right.requires_grad else []), *([right] if left.requires_grad else [])]


def _lerp_keeps(call: Call) -> Kept:
    """a + w (b - a): w for the gradients of a and b, both of them for w's."""
    a, b, w = call.inputs
    return [*([w] if a.requires_grad or b.requires_grad else []), *([a, b] if w.requires_grad else [])]


def _free(call: Call) -> float:
    return 0.0


def _each(count: int) -> Callable[[Call], float]:
    """`count` operations for every element of the result."""
    return lambda call: count * call.size


def _over(count: int) -> Callable[[Call], float]:
    """`count` operations for every element of the input."""
    return lambda call: count * call.inputs[0].numel()


def _linear(call: Call) -> float:
    x, weight = call.inputs[:2]
    return 2 * x.numel() * weight.shape[0] + (call.size if len(call.inputs) > 2 else 0)


def _matmul(call: Call) -> float:
    return 2 * call.size * call.inputs[0].shape[-1]


def letters(pattern: str, operands: Iterable[Tensor]) -> dict[str, int]:
    """The sizes behind the letters of an einsum."""
    terms = pattern.split("->")[0].split(",")
    pairs = [zip(term.strip(), each.shape, strict=True) for term, each in zip(terms, operands, strict=True)]
    return dict(chain.from_iterable(pairs))


def _einsum(call: Call) -> float:
    """A multiplication and an addition for every combination of the letters."""
    return 2 * math.prod(letters(call.args[0], call.inputs).values())


def _rms_norm(call: Call) -> float:
    """Square, add up, scale, and the gain; the root once a row."""
    x = call.inputs[0]
    return (3 + (len(call.inputs) > 1)) * x.numel() + 3 * (x.numel() // x.shape[-1])


def _rms_norm_keeps(call: Call) -> Kept:
    """x, its root a row, and x / rms(x) where a gain learns from it."""
    x, *gain = call.inputs
    rows = x.numel() // x.shape[-1]
    normed = x.nbytes if gain and gain[0].requires_grad else 0
    return [x, Unseen(rows * x.element_size()), Unseen(normed)]


def _rms_norm_between(call: Call) -> int:
    """The squares are written and read again, and so is x / rms(x) where a gain follows."""
    return (5 if len(call.inputs) > 1 else 3) * call.inputs[0].nbytes


def _layer_norm(call: Call) -> float:
    """Mean; difference, square and sum for the variance; difference and scale; gain and shift."""
    x = call.inputs[0]
    return (6 + len(call.inputs) - 1) * x.numel()


def _layer_norm_keeps(call: Call) -> Kept:
    x = call.inputs[0]
    return [x, Unseen(2 * x.element_size() * (x.numel() // x.shape[-1]))]


def attention(call: Call, pairs: float) -> float:
    """Scores and values of `pairs` query-key pairs: 4 e each; scale, mask and softmax: 7."""
    return pairs * (4 * call.inputs[0].shape[-1] + 7)


def _attention(call: Call) -> float:
    """Every query with every key: a mask hides a score and does not save it."""
    q, k = call.inputs[:2]
    return attention(call, q.numel() / q.shape[-1] * k.shape[-2])


def _attention_keeps(call: Call) -> Kept:
    """q, k, v, the result, the log-sum of every query, and the mask as numbers to add.

    A mask that learns needs the weights of every pair, and scaled copies of what made them.
    """
    q, k, v, *mask = call.inputs
    if mask and mask[0].requires_grad:
        weights = q.numel() // q.shape[-1] * k.shape[-2] * q.element_size()
        return [Unseen(q.nbytes + k.nbytes + weights), v if v.is_contiguous() else Unseen(v.nbytes)]
    extra = [Unseen(mask[0].numel() * q.element_size())] if mask else []
    return [q, k, v, *call.outputs, Unseen(4 * q.numel() // q.shape[-1]), *extra]


def _attention_between(call: Call) -> int:
    """With a mask that learns: scaled copies of q and k, and the scores after every step."""
    q, k, _, *mask = call.inputs
    if not (mask and mask[0].requires_grad):
        return 0
    pairs = q.numel() // q.shape[-1] * k.shape[-2] * q.element_size()
    return 2 * (q.nbytes + k.nbytes) + 6 * pairs


def _indices(call: Call) -> Kept:
    """Where the gradient of a gathered element goes."""
    return [one for one in call.inputs[1:] if one.dtype is torch.int64]


_GIVES = _each(1)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "__rsub__", "neg", "abs", "maximum", "minimum", "cumsum"), Rule(_GIVES, _nothing)),
    **dict.fromkeys(("mul", "div"), Rule(_GIVES, _factors)),
    **dict.fromkeys(
        ("square", "pow", "__rpow__", "clamp_min", "clamp", "relu", "cos", "sin", "log", "erf"), Rule(_GIVES, _first)
    ),
    **dict.fromkeys(("rsqrt", "sqrt", "exp", "sigmoid", "tanh", "reciprocal"), Rule(_GIVES, _result)),
    "lerp": Rule(_each(3), _lerp_keeps),
    "silu": Rule(_each(2), _first),
    "gelu": Rule(_each(5), _first),
    **dict.fromkeys(("sum", "mean"), Rule(_over(1), _nothing)),
    **dict.fromkeys(("amax", "max", "norm"), Rule(_over(1), lambda call: [*_first(call), *_result(call)])),
    "softmax": Rule(_each(5), _result),
    # maximum, difference, exp and sum; then log, the maximum back, and a guard for one that is infinite
    "logsumexp": Rule(
        lambda call: 4 * call.inputs[0].numel() + 3 * call.size, lambda call: [*_first(call), *_result(call)]
    ),
    "linear": Rule(_linear, _factors),
    "matmul": Rule(_matmul, _factors),
    "einsum": Rule(_einsum, _factors),
    "rms_norm": Rule(_rms_norm, _rms_norm_keeps, _rms_norm_between),
    "layer_norm": Rule(_layer_norm, _layer_norm_keeps),
    "embedding": Rule(_free, _first),
    "__getitem__": Rule(_free, _indices),
    "where": Rule(_free, _first),
    "scaled_dot_product_attention": Rule(_attention, _attention_keeps, _attention_between),
    # shapes, views, copies and fills; comparisons and whole numbers
    **dict.fromkeys(
        ("stack", "cat", "to", "float", "clone", "contiguous", "pad", "roll", "tril", "masked_fill", "select",
         "unflatten", "flatten", "unbind", "__iter__", "split", "chunk", "transpose", "movedim", "permute", "squeeze",
         "unsqueeze", "expand", "expand_as", "view", "reshape", "narrow", "repeat_interleave", "new_zeros", "new_ones",
         "new_full", "new_empty", "zeros", "ones", "zeros_like", "ones_like", "full_like", "empty", "full", "eye",
         "arange", "as_tensor", "tensor", "detach", "requires_grad_", "type_as", "__and__", "__or__", "__invert__",
         "lt", "le", "ge", "gt", "eq", "ne", "__eq__", "__ne__", "remainder", "floor_divide", "__floordiv__", "__mod__",
         "diff", "any", "all"),
        Rule(_free, _nothing),
    ),
}  # fmt: skip
"""By the name of the function, as torch's function mode gives it."""

SILENT = frozenset(
    ("__get__", "__len__", "dim", "size", "promote_types", "numel", "stride", "is_floating_point", "storage_offset",
     "element_size", "untyped_storage", "is_contiguous", "__hash__", "__format__", "__repr__", "data_ptr", "ndimension")
)  # fmt: skip
"""Questions about a tensor, which cost nothing."""
