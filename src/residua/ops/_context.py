"""What autograd hands from a forward pass to its backward pass.

Tensors go through `save_for_backward`, which frees and checks them; anything else is an attribute of the op's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

Inputs = tuple[Any, ...]
"""The arguments of an operator, in its schema's order; lists of tensors stay lists."""

Gradients = tuple[object, ...]
"""One for each of them: a tensor, a list where it was one, or None."""

if TYPE_CHECKING:

    class Context:
        """`ctx` of an `autograd.Function` and of an operator of `torch.library`."""

        saved_tensors: tuple[Any, ...]  # None where None was saved
        needs_input_grad: tuple[Any, ...]  # nested where an argument is a list

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def set_materialize_grads(self, value: bool) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

else:
    Context = object  # torch makes a class of its own for every function
