"""The stream of a model, and what a model returns: ours, or a converted one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from residua.stream import Stream


def find_stream(model: nn.Module) -> Stream[Any]:
    """The one stream of a model: ours, a converted one, or one inside a wrapper such as DDP or a compiled model."""
    streams = [module for module in model.modules() if isinstance(module, Stream)]
    if len(streams) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(streams)} residual streams, and exactly one can be observed; "
            "pass a residua Transformer or a converted model"
        )
    return streams[0]


def in_backward() -> bool:
    """Whether autograd is running: a read or write then is a recomputation of one already seen."""
    return torch._C._current_graph_task_id() != -1


def logits_of(output: Any) -> Tensor:
    """The logits: what our models return, and an attribute of what Hugging Face's do."""
    return output if isinstance(output, Tensor) else output.logits
