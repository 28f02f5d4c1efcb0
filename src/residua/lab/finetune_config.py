"""Which checkpoint is fine-tuned, and how: the recipe from which the flags are made, before torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from residua.lab.train.recipe import Recipe
from residua.spec import parse, render

MODEL = "model"
"""The folder of a run that holds the fine-tuned model, as Hugging Face saves one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(Recipe):
    """Which checkpoint, and how it is trained on."""

    checkpoint: Annotated[str, "Directory of the Hugging Face model, or a hub name."] = ""
    design: Annotated[str | None, "Convert to this design first; by default the checkpoint is used as it is."] = None
    layout: Annotated[str | None, "With --design: sublayers to insert, such as swa:window=16,attn,mlp."] = None
    freeze: Annotated[bool, "Train the parameters of the design (and inserted sublayers) only."] = False
    lr: Annotated[float, "Learning rate of the base."] = 5e-5
    residual_lr: Annotated[float | None, "Learning rate of the parameters that conversion added."] = 5e-3
    weight_decay: Annotated[
        float, "Weight decay of matrices; none for norms, embeddings and the design's parameters."
    ] = 0.0
    tokenizer: Annotated[str, "auto (the checkpoint's, else bytes), bytes, bpe:VOCAB or hf:DIR."] = "auto"

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)  # super() has no class to start from in a dataclass with slots
        if not self.checkpoint:
            raise ValueError("name the checkpoint to fine-tune: a directory of a Hugging Face model, or a hub name")
        if self.design is not None:
            object.__setattr__(self, "design", render(*parse(self.design)))
        elif self.layout is not None:
            raise ValueError("layout inserts sublayers while converting; name the design too, with --design")
        if self.tokenizer == "auto":
            from residua.lab.data.tokenizer import name_beside

            try:
                object.__setattr__(self, "tokenizer", name_beside(self.checkpoint))
            except ValueError as error:
                raise ValueError(f"{error}, or give --tokenizer") from None
