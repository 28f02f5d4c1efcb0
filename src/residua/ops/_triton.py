"""Triton kernels for CUDA: what their launches share; `_triton_registry` says which ops have one.

**No GPU has timed these kernels.** They are checked on a CPU with Triton's interpreter, outputs and every gradient
against the reference, and compiled ahead of time for real GPUs; their speed and their block sizes are unmeasured.

Every op is a `torch.library` operator, so that autograd, checkpointing and `torch.compile` see one node and never the
pointers inside it.

Sources are read where they are, through a table of their addresses (`_triton_table`). Offsets are 64-bit, sums are
float32 (float64 for float64), and nothing is added up by atomics: a gradient that sums over tokens is written as one
partial sum a program and added up afterwards, so the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from residua.native.guard import Unsupported

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BLOCK = 2048
"""Numbers of one tensor that a program holds at a time, unless one token is wider."""


Launcher = Callable[..., None]
Settings = dict[str, Any]
"""The constants that a kernel is compiled with, by name, and its number of warps."""

_launcher: Launcher | None = None


@contextmanager
def launching(by: Launcher) -> Iterator[None]:
    """Hand every launch in the `with`, with the arguments of `launch`, to something else, such as a compiler."""
    global _launcher
    before, _launcher = _launcher, by
    try:
        yield
    finally:
        _launcher = before


def launch(kernel: Any, grid: tuple[int, ...], where: Tensor, *arguments: Any, warps: int = 4, **settings: Any) -> None:
    """Run a kernel on the device of `where`; an empty grid is no work."""
    if _launcher is not None:
        _launcher(kernel, grid, where, *arguments, warps=warps, **settings)
    elif all(grid):
        with torch.cuda.device_of(where):
            kernel[grid](*arguments, num_warps=warps, **settings)


def programs(where: Tensor) -> int:
    """How many programs share a sum over tokens, and so how many partial sums there are."""
    if where.device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(where.device).multi_processor_count
    return 3


def power(n: int) -> int:
    """The least power of two that holds n."""
    return 1 << max(n - 1, 0).bit_length()


def tokens_a_block(width: int) -> int:
    """How many tokens of `width` numbers, a power of two, one program takes at a time."""
    return max(1, BLOCK // width)


def warps(numbers: int) -> int:
    """Warps for a block of so many numbers: 16 a thread."""
    return min(16, max(1, numbers // 512))


def checked(*tensors: Tensor) -> None:
    """Decline what no kernel here takes."""
    for tensor in tensors:
        if tensor.dtype not in TYPES:
            raise Unsupported(f"{tensor.dtype} tensors")
        if not torch.compiler.is_compiling() and hasattr(tensor, "to_local"):
            raise Unsupported("a DTensor, whose pieces lie on several ranks; a kernel takes its local one, to_local()")
        if tensor.device != tensors[0].device:
            raise Unsupported(f"tensors on {tensors[0].device} and on {tensor.device}")


def alike(sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sources in one type, as a stack of them would be: a table's addresses have one type."""
    dtype = sources[0].dtype
    for source in sources:
        if source.shape != sources[0].shape:
            raise ValueError(f"sources of one shape, not {tuple(sources[0].shape)} and {tuple(source.shape)}")
        dtype = torch.promote_types(dtype, source.dtype)
    return tuple(source.to(dtype) for source in sources)


def aligned(tensors: Sequence[Tensor | None], width: int) -> bool:
    """Whether every row of every tensor starts at 16 bytes, so that loads may be as wide as the hardware's."""
    return all(
        tensor is None or (tensor.data_ptr() % 16 == 0 and width * tensor.element_size() % 16 == 0)
        for tensor in tensors
    )
