"""widened(layer, run): a layer in float32, of which the linear maps are wide only while they run.

    above the layer itself    the largest linear map in float32, and all that is no linear map

Where a layer reaches for the weight of a linear map that it does not call, or asks for its dtype, that would not be the
layer in float32: `run` runs it once to see, and such a layer is widened whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from residua.hf.anatomy import Argument
from residua.hf.identity import in_float32

HALVES = (torch.float16, torch.bfloat16)
LINEAR = (nn.Linear, Conv1D)


@contextmanager
def widened(layer: nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """Inside, the layer computes in float32; afterwards it is as it was."""
    if not any(each.dtype in HALVES for each in layer.parameters()):
        yield
        return
    maps = [each for each in layer.modules() if type(each) in LINEAR and each.weight.dtype in HALVES]
    with ExitStack() as stack:
        stack.enter_context(in_float32(layer, apart=maps))
        hooks = stack.enter_context(_wide_while_running(maps))
        if not _computes_in_float32(layer, run):
            hooks.close()
            stack.enter_context(in_float32(layer))
        yield


@contextmanager
def _wide_while_running(maps: Sequence[nn.Module]) -> Iterator[ExitStack]:
    """Inside, or until the stack is closed, these modules have their parameters in float32 while they run."""
    narrow: dict[nn.Parameter, Tensor] = {}

    def before(module: nn.Module, args: object) -> None:
        with torch._C.DisableTorchFunction():  # what is done here is no part of the layer
            for each in module.parameters():
                if each not in narrow:
                    narrow[each] = each.data
                    each.data = each.data.float()

    def after(module: nn.Module, args: object, made: object) -> None:
        with torch._C.DisableTorchFunction():
            for each in module.parameters():
                each.data = narrow.pop(each, each.data)

    with ExitStack() as stack:
        for module in maps:
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield stack


def _computes_in_float32(layer: nn.Module, run: Callable[[], object]) -> bool:
    """Whether nothing in a layer is refused for its dtype, or made in half precision, when it runs."""
    seen: list[torch.dtype] = []

    def watch(module: nn.Module, args: Argument, made: Argument) -> None:
        seen.extend(each.dtype for each in pytree.tree_leaves((args, made)) if isinstance(each, Tensor))

    handles = [each.register_forward_hook(watch) for each in layer.modules()]
    try:
        run()
    except (RuntimeError, TypeError, ValueError):
        return False  # or the layer does not run at all, which is told where it is read
    finally:
        for handle in handles:
            handle.remove()
    return not any(each in HALVES for each in seen)
