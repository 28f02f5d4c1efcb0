"""What stands between tensors and raw pointers: which calls a kernel in C may serve, and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from residua.native.build import Unavailable
from residua.native.library import TYPES, library
from residua.ops._backend import Unsupported


def watched() -> bool:
    """Whether somebody follows torch's operations: a compiler, or a dispatch mode such as that of fake tensors."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def foreign(*tensors: Tensor) -> bool:
    """Whether the tensors are not plain numbers: under a functorch transform, or of a subclass."""
    for tensor in tensors:  # a loop: of every read of every token, and any() is slower
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return True
    return torch._C._are_functorch_transforms_active()


def traced(*tensors: Tensor) -> bool:
    """Whether an op must be seen as operations of torch: native code would be a hole in what is followed.

    Such calls take the op's form in PyTorch, which is what compilers and transforms fuse, batch or distribute.
    """
    return watched() or foreign(*tensors)


def require(*tensors: Tensor) -> None:
    """Raise `Unsupported` unless the library is there and can read these tensors where they are."""
    try:
        library()
    except Unavailable as reason:
        raise Unsupported(str(reason)) from None
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Unsupported(f"a {tensor.layout} tensor on {tensor.device}")
        if tensor.dtype not in TYPES:
            raise Unsupported(f"{tensor.dtype} has no kernel; {', '.join(map(str, TYPES))} have one")


def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor in order, without conjugation or broken alignment; itself where it already is."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.detach().to(dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.detach().clone() if tensor.data_ptr() % tensor.element_size() else tensor


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers are; NULL for none."""
    return None if tensor is None else tensor.data_ptr()


def differentiate(
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    gradients: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of `reference` as a graph of torch operations, for `create_graph=True`."""
    with torch.enable_grad():
        found = reference(*inputs)
        chosen = [one for one, want in zip(inputs, wanted, strict=True) if want]
        answers = iter(torch.autograd.grad(found, chosen, gradients, create_graph=True, allow_unused=True))
    return tuple(next(answers) if want else None for want in wanted)
