"""Standing between a model and its stream: the methods of one instance are wrapped for the length of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from residua.stream import Stream

UNCOMPILED = "torch.compile would bake the observed calls into its graph; use the plain model to observe it"


def find_stream(model: nn.Module) -> Stream[Any]:
    """The one stream of a model: ours, a converted one, or one inside a wrapper such as DDP."""
    streams = [module for module in model.modules() if isinstance(module, Stream)]
    if len(streams) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(streams)} residual streams, and exactly one can be observed; "
            "pass a residua Transformer or a converted model"
        )
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(
                f"{type(module).__name__} is compiled: {UNCOMPILED} (a compiled one has it as _orig_mod)"
            )
    return streams[0]


@contextmanager
def wrapped(stream: Stream[Any], **methods: Callable[..., Any]) -> Iterator[None]:
    """`methods` in place of the stream's own, restored on the way out, whatever happened inside.

    One observer at a time: a second is refused, since each would record what the other does.
    """
    taken = [name for name in ("open", "read", "write") if name in vars(stream)]
    if taken:
        raise RuntimeError(
            f"the {taken[0]} of this {type(stream).__name__} is wrapped already, by record_routing or ablate_sources; "
            "leave that context first"
        )
    for name, method in methods.items():
        setattr(stream, name, torch.compiler.disable(method, reason=UNCOMPILED))
    try:
        yield
    finally:
        for name in methods:
            vars(stream).pop(name, None)


def in_backward() -> bool:
    """Whether autograd is running: a read or write then is a recomputation of one already seen."""
    return torch._C._current_graph_task_id() != -1


def logits_of(output: Any) -> Tensor:
    """The logits: what our models return, and an attribute of what Hugging Face's do."""
    return output if isinstance(output, Tensor) else output.logits
