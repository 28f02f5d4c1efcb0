"""What stands between tensors and raw pointers: which calls a kernel in C may serve, and how autograd sees one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from residua.native.library import TYPES, asked_while_tracing, available, reason


class Unsupported(Exception):
    """Raised by a kernel for a case it does not serve; the message is the reason."""


def watched() -> bool:
    """Whether somebody follows torch's operations: a compiler, a tracer, or a dispatch mode such as that of fake
    tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def forward_mode() -> bool:
    """Whether tensors may carry tangents, which native code would drop."""
    return forward_ad._current_level >= 0


def foreign(*tensors: Tensor) -> bool:
    """Whether the tensors are not plain numbers: with tangents, under a functorch transform, or of a subclass."""
    for tensor in tensors:  # a loop: of every read of every token, and any() is slower
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def transformed(*tensors: Tensor) -> bool:
    """`foreign`, but to a compiler, which sees what it compiles as it is."""
    return not torch.compiler.is_compiling() and foreign(*tensors)


def traced(*tensors: Tensor) -> bool:
    """Whether an op must be seen as operations of torch: native code would be a hole in what is followed.

    Such calls take the op's form in PyTorch, which is what compilers and transforms fuse, batch or distribute.
    """
    return watched() or foreign(*tensors)


def only_torch(*tensors: Tensor) -> bool:
    """Whether neither a kernel nor the operator that stands for it can take these tensors.

    An operator is followed by compilers and dispatch modes, whose tensors may be fake ones; it is not distributed, and
    has no tangents.
    """
    if not watched():
        return foreign(*tensors)
    if any(hasattr(one, "to_local") for one in tensors):
        return True
    return _under_transform()


def _under_transform() -> bool:
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


asked_while_tracing(_under_transform)


def require(*tensors: Tensor) -> None:
    """Raise `Unsupported` unless the library is there and can read these tensors where they are."""
    if not available():
        raise Unsupported(reason())
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Unsupported(f"a {tensor.layout} tensor on {tensor.device}")
        if tensor.dtype not in TYPES:
            raise Unsupported(f"{tensor.dtype} has no kernel; {', '.join(map(str, TYPES))} have one")


def bare(*tensors: Tensor) -> bool:
    """Whether numbers alone are wanted, of tensors that C can read where they are, all of one type: no gradient, nobody
    who follows or transforms. Decoding asks this at every step of every token, and then takes the shortest way."""
    if torch.is_grad_enabled() or watched() or _under_transform() or not available():
        return False
    dtype = tensors[0].dtype
    if dtype not in TYPES:
        return False
    for tensor in tensors:
        if (
            (type(tensor) is not Tensor and type(tensor) is not nn.Parameter)
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.data_ptr() % tensor.element_size()
        ):
            return False
    return True


def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor in order, without a pending sign or broken alignment; itself where it already is."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.detach().to(dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.detach().clone() if tensor.data_ptr() % tensor.element_size() else tensor


def empties(inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Room for the gradient of each input that wants one."""
    return [
        torch.empty(one.shape, dtype=one.dtype, device="cpu") if want else None
        for one, want in zip(inputs, wanted, strict=True)
    ]


def differentiate(
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    gradients: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of `reference` as a graph of torch operations, for `create_graph=True`; None for what has none."""
    with torch.enable_grad():
        inputs = [None if one is None else alias(one) for one in inputs]
        outputs = reference(*inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        # an autograd.Function hands a frozen input on as if it wanted a gradient
        pairs = [(one, slope) for one, slope in zip(outputs, gradients, strict=True) if one.requires_grad]
        chosen = [one for one, want in zip(inputs, wanted, strict=True) if want and one is not None]
        made, slopes = zip(*pairs, strict=True)
        answers = iter(torch.autograd.grad(made, chosen, slopes, create_graph=True, allow_unused=True))
    return tuple(next(answers) if want else None for want in wanted)


def batched(*gradients: Tensor | None) -> bool:
    """Whether gradients are many at once (`is_grads_batched`), and no numbers that lie somewhere."""
    return any(one is not None and not torch._C._has_storage(one) for one in gradients)


def alias(tensor: Tensor) -> Tensor:
    """The same tensor, to differentiate by: an input that was made from another would pass its gradient on to that."""
    return tensor.view_as(tensor)


@dataclass(frozen=True)
class Kernel:
    """An op in C as autograd takes it: only references to the inputs are kept between forward and backward.

    forward:   inputs, then options -> output, or several.
    backward:  (inputs, wanted, gradient of the output, or several), then options -> a gradient for each wanted input.
    reference: as forward, in PyTorch: second derivatives are its.

    Options are numbers, and tensors that nothing is differentiated by.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Sequence[Tensor | None]]
    reference: Callable[..., Any]

    def __call__(self, inputs: Sequence[Tensor], *options: float | int | Tensor) -> Any:
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            return _Differentiable.apply(self, options, *inputs)
        return self.forward(*inputs, *options)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, options: tuple[float | int | Tensor, ...], *inputs: Tensor) -> Any:
        ctx.kernel, ctx.options = kernel, options
        ctx.save_for_backward(*inputs)
        return kernel.forward(*inputs, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients if len(gradients) > 1 else gradients[0]
        kernel, options, wanted = ctx.kernel, ctx.options, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or batched(*gradients):
            again = differentiate(lambda *one: kernel.reference(*one, *options), ctx.saved_tensors, wanted, gradient)
            return None, None, *again
        return None, None, *kernel.backward(ctx.saved_tensors, wanted, gradient, *options)
