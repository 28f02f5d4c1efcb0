"""An op with a kernel as an operator of torch.library: one node to a compiler, an exporter or a dispatch mode.

    DELTA_WRITE = Operator(
        "delta_write", "Tensor X, Tensor k, Tensor value, Tensor beta, float eps",
        Kernel(_forward, _backward, _reference), fake=lambda X, *rest: X.new_empty(X.shape),
    )
    DELTA_WRITE((X, k, value, beta), eps)

declares `residua::delta_write` and `residua::delta_write_backward`. A call in eager code goes to the kernel by the
shortest way; a call that is followed (`guard.watched`) becomes the operator, which runs the same kernel when the graph
runs. Second derivatives are the reference's, and so is all that `guard.only_torch` keeps from both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.native.guard import Kernel, Unsupported, differentiate, require, watched
from residua.ops._backend import fall_back

Argument = Tensor | list[Tensor] | float | int


class Operator:
    """A `Kernel` that is also `residua::name`."""

    def __init__(self, name: str, arguments: str, kernel: Kernel, fake: Callable[..., Any], results: int = 1) -> None:
        """arguments: those of the schema, tensors first, of which one, the last, may be a list (`Tensor[]`).

        fake: as the kernel's forward, for tensors without numbers: an empty, contiguous result, or several.
        """
        self.name, self.kernel, self.fake = name, kernel, fake
        kinds = [one.split()[0] for one in arguments.split(", ")]
        self._tensors = sum(kind.startswith("Tensor") for kind in kinds)
        self._listed = "Tensor[]" in kinds
        # schemas are written out: under jaxtyping's import hook annotations cannot be read back
        self._forward = torch.library.custom_op(
            f"residua::{name}", self._run, mutates_args=(), device_types="cpu",
            schema=f"({arguments}) -> " + ("Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"),
        )  # fmt: skip
        self._backward = torch.library.custom_op(
            f"residua::{name}_backward", self._run_backward, mutates_args=(), device_types="cpu",
            schema=f"({'Tensor' if results == 1 else 'Tensor[]'} gradient, {arguments}, bool[] wanted) -> Tensor[]",
        )  # fmt: skip
        self._forward.register_fake(lambda *given: fake(*self._flat(given)[0], *self._flat(given)[1]))
        self._backward.register_fake(self._fake_backward)
        self._forward.register_autograd(self._differentiated, setup_context=self._keep)

    def __call__(self, inputs: Sequence[Tensor], *options: float | int) -> Any:
        """The kernel's result: `inputs` one after the other, those of a list too."""
        if watched():
            return self._forward(*self._shaped(inputs), *options)
        return self.kernel(inputs, *options)

    def _shaped(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Flat inputs as the schema has them."""
        if not self._listed:
            return tuple(inputs)
        single = self._tensors - 1
        return (*inputs[:single], list(inputs[single:]))

    def _flat(self, given: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """The schema's arguments as inputs, one after the other, and options."""
        tensors, options = given[: self._tensors], given[self._tensors :]
        return ([*tensors[:-1], *tensors[-1]] if self._listed else list(tensors)), options

    def _run(self, *given: Argument) -> Any:
        inputs, options = self._flat(given)
        if self._served(inputs):
            return self.kernel.forward(*inputs, *options)
        return pytree.tree_map(_apart, self.kernel.reference(*inputs, *options))

    def _run_backward(self, gradient: Tensor | list[Tensor], *given: Any) -> list[Tensor]:
        *given, wanted = given  # type: ignore[assignment]
        inputs, options = self._flat(given)
        if self._served(inputs):
            found = self.kernel.backward(inputs, wanted, gradient, *options)
            return [one.contiguous() for one in found if one is not None]
        # autograd sees nothing inside an operator; a transform does
        slopes: Any = torch.func.vjp(lambda *one: self.kernel.reference(*one, *options), *inputs)[1]
        found = slopes(tuple(gradient) if isinstance(gradient, list) else gradient)
        return [_apart(one) for one, want in zip(found, wanted, strict=True) if want]

    def _served(self, inputs: list[Tensor]) -> bool:
        """Whether the kernel runs here: a graph may have been made where there was a library."""
        try:
            require(*inputs)
        except Unsupported as reason:
            fall_back(self.name, f"a graph calls residua::{self.name}: {reason}")
            return False
        return True

    def _fake_backward(self, gradient: Tensor | list[Tensor], *given: Any) -> list[Tensor]:
        *given, wanted = given  # type: ignore[assignment]
        inputs, _ = self._flat(given)
        return [one.new_empty(one.shape) for one, want in zip(inputs, wanted, strict=True) if want]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        flat, ctx.options = self._flat(inputs)
        ctx.save_for_backward(*flat)

    def _differentiated(self, ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = list(gradients) if len(gradients) > 1 else gradients[0]
        inputs, options, kernel = ctx.saved_tensors, ctx.options, self.kernel
        wanted = self._flat(ctx.needs_input_grad)[0]
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # create_graph: second derivatives are the reference's
            found = differentiate(lambda *one: kernel.reference(*one, *options), inputs, wanted, gradient)
        else:
            made = iter(self._backward(gradient, *self._shaped(inputs), *options, wanted))
            found = [next(made) if want else None for want in wanted]
        return (*self._shaped(found), *(None for _ in options))


def _apart(one: Tensor) -> Tensor:
    """In memory of its own: what an operator returns must not share any."""
    return one.clone(memory_format=torch.contiguous_format)
