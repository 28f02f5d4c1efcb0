"""export_onnx(model, file): logits = f(input_ids, attention_mask) as an ONNX graph of plain operators.

Batch and length are free, and there is no cache.

The kernels of `residua.ops` have no counterpart in ONNX; their definitions, which every kernel is tested against, have.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from residua import ops
from residua.extras import need
from residua.hf.anatomy import Model


class Logits(nn.Module):
    """ids, mask -> logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def export_onnx(model: Model, file: Path | str) -> None:
    """Write a model with a head that gives logits."""
    need("onnx", "onnx", "onnxscript")
    row = torch.zeros(2, 8, dtype=torch.long)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    training = model.training
    with ops.backend("reference"), torch.no_grad():
        torch.onnx.export(
            Logits(model).eval(), (row, torch.ones_like(row)), str(file), dynamo=True, verbose=False,
            input_names=["input_ids", "attention_mask"], output_names=["logits"],
            dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        )  # fmt: skip
    model.train(training)
