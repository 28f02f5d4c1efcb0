"""What a forward really does: every operator that PyTorch runs, and every tensor that autograd keeps.

Operators are counted where they are dispatched, the elementwise ones too. A product of matrices is two operations a
multiplication; every other operator is one operation an element of its larger side, after PyTorch's own decomposition
of the compound ones (softmax, attention, layer norm, ...). Nothing here knows a design or a formula of `predict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OperatorBase, OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

_aten = torch.ops.aten

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
"""Operators that multiply matrices, and which argument is the left factor."""

_STEPS = {"var_mean": 4}
"""Operators that PyTorch decomposes no further, and their steps an element: here a sum, a difference, its square and
the sum of those."""

_MOVES = frozenset(
    ("_to_copy", "clone", "copy_", "stack", "cat", "contiguous", "constant_pad_nd", "fill_", "empty", "empty_like",
     "new_empty", "new_empty_strided", "empty_strided", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
     "new_ones", "full", "full_like", "new_full", "eye", "arange", "scalar_tensor", "embedding", "where",
     "masked_fill", "_unsafe_view", "tril", "triu", "index_select", "repeat")
)  # fmt: skip
"""Operators that move or fill memory and compute nothing."""


class OperatorCounter(TorchDispatchMode):
    """Floating-point operations and bytes of everything that runs inside the `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes_moved = 0
        """Inputs and outputs of every operator that is no view: what moves if no cache ever helps."""
        self.calls: Counter[str] = Counter()
        self._decomposed: dict[tuple[object, ...], int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # no operator of its own: count the ones it calls
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if func.is_view or func.namespace != "aten":
            return out
        name = func.overloadpacket.__name__
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if name not in ("detach", "_unsafe_view"):
            self.calls[name] += 1
            self.bytes_moved += sum(map(_nbytes, (*inputs, *outputs)))
        self.flops += self._operations(func, name, args, kwargs, inputs, outputs)
        return out

    def _operations(
        self,
        func: OpOverload,
        name: str,
        args: Arguments,
        kwargs: Keywords,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> int:
        if name in _MOVES or not outputs or not outputs[0].is_floating_point():
            return 0
        if name in _PRODUCTS:
            return (
                2 * outputs[0].numel() * args[_PRODUCTS[name]].shape[-1]
                + name.startswith(("add", "badd")) * outputs[0].numel()
            )
        if func in _compound():
            return self._inside(func, args, kwargs)
        return _STEPS.get(name, 1) * max(leaf.numel() for leaf in (*inputs, outputs[0]))

    def _inside(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> int:
        """The operations of a compound operator: its decomposition, run on tensors without data."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (func, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves))
        if key not in self._decomposed:
            empty = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(empty, spec)
            with OperatorCounter() as inner, torch.no_grad():
                _compound()[func](*args, **kwargs)
            self._decomposed[key] = inner.flops
        return self._decomposed[key]


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps for the backward pass, each storage once, without what is held anyway."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        self._held = {_storage(tensor) for tensor in held}
        self._kept: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._held:
            # keeping the tensor keeps the address from being given to another one
            self._kept.setdefault(_storage(tensor), tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensor: Tensor) -> int:
    """What is really there: an expanded axis is read from one place."""
    held = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        held *= size if stride else 1
    return held * tensor.element_size()


_found: dict[OperatorBase, Callable[..., object]] = {}


def _compound() -> dict[OperatorBase, Callable[..., object]]:
    """Operators with several steps an element, and PyTorch's decomposition of each."""
    if not _found:
        from torch._decomp import get_decompositions

        _found.update(
            get_decompositions(
                [
                    _aten._softmax, _aten._safe_softmax, _aten._log_softmax, _aten.logsumexp,
                    _aten.native_layer_norm, _aten.silu, _aten.gelu, _aten._scaled_dot_product_flash_attention_for_cpu,
                ]
            )
        )  # fmt: skip
    return _found
