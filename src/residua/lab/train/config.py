"""One training run of a model of our own, in one frozen dataclass of plain values that goes into JSON and back.

A config that exists can be built: the fields, the layout, the design and their combination are checked when it is
made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from residua.lab.train.recipe import Field as Field
from residua.lab.train.recipe import Recipe, fields_of

if TYPE_CHECKING:
    from residua.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Recipe):
    """Model, data and recipe. Two runs of one config are the same run."""

    design: Annotated[str, "Residual design, such as delta:blocks=4."] = "standard"
    layout: Annotated[str, "Sublayers of a block."] = "attn,mlp"
    width: Annotated[int, "Model width."] = 128
    depth: Annotated[int, "Number of Transformer blocks."] = 6
    heads: Annotated[int, "Number of attention heads."] = 4
    kv_heads: Annotated[int | None, "Number of key and value heads; heads by default."] = None
    mlp_width: Annotated[int | None, "Hidden width of the MLP; 8/3 of the width by default."] = None
    qk_norm: Annotated[bool, "RMS-normalise queries and keys."] = False
    rope_base: Annotated[float, "RoPE base."] = 10_000.0
    lane_norms: Annotated[Literal["shared", "separate"], "One pre-norm gain for q, k and v, or one for each."] = (
        "shared"
    )
    tied: Annotated[bool, "Tie the output matrix to the embedding."] = True
    eps: Annotated[float, "RMSNorm epsilon."] = 1e-9
    init_std: Annotated[float | None, "Standard deviation of initial weights; 0.5 / sqrt(width) by default."] = None
    objective: Annotated[
        Literal["clm", "mlm"], "clm: next-token prediction (decoder); mlm: masked tokens (encoder)."
    ] = "clm"
    fp32_stream: Annotated[
        bool, "With dtype=bfloat16: keep the residual stream and the design's arithmetic in float32."
    ] = False
    stream_rms: Annotated[bool, "Log the RMS of every sublayer's input at validation."] = False

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)  # super() has no class to start from in a dataclass with slots
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"rope_base must be a positive number, not {self.rope_base}")
        if self.fp32_stream and self.dtype == "float32":
            raise ValueError("fp32_stream has no effect with dtype=float32; drop it or use dtype=bfloat16")
        # one spelling for one design, so that defaults written out do not make another run of it
        object.__setattr__(self, "design", _built(self.model(vocab=2)))

    @property
    def masked(self) -> bool:
        return self.objective == "mlm"

    def model(self, vocab: int) -> ModelConfig:
        """The model's part, for a vocabulary."""
        from residua.model.config import ModelConfig

        shared = {field.name for field in fields(ModelConfig)} & set(config_fields())
        return ModelConfig(vocab=vocab, causal=not self.masked, **{name: getattr(self, name) for name in shared})


def config_fields() -> dict[str, Field]:
    """Every field of a `TrainConfig` by name, with its kind, choices, default and help."""
    return fields_of(TrainConfig)


@lru_cache(maxsize=256)
def _built(model: ModelConfig) -> str:
    """The shortest spelling of a design, from its model built without memory: a wrong design, layout or combination
    of them says so here."""
    from residua.counting.shapes import unfilled
    from residua.model import Transformer

    with unfilled():
        return Transformer(model).stream.spec
