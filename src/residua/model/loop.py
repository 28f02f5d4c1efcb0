"""What a later pass over the same blocks begins with: a sublayer that reads the stream and writes the difference."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from residua.model.config import ModelConfig
from residua.model.context import Context
from residua.model.local import Started
from residua.model.norms import LaneNorm, NoNorm
from residua.model.sublayers import Sublayer
from residua.plan import Site


class Injection(Started):
    """A [x; e], A = [I 0] at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width))

    def start(self) -> None:
        width = len(self.weight)
        self.weight.copy_(torch.eye(width, 2 * width))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat([x, e], -1), self.weight)


class Again(Sublayer):
    """y = g(x) - x, so that the standard stream x becomes g(x): N(x), x + e or A [x; e]. It reads without a norm."""

    def __init__(self, config: ModelConfig, site: Site, form: str, final: LaneNorm | NoNorm) -> None:
        super().__init__(config, site, 1)
        self.norm, self.form = NoNorm(), form
        self._final = (final,)  # the model's own, and no second place for its weights
        self.injection = Injection(config.width) if form == "linear" else None

    def forward(self, x: Tensor, *, context: Context) -> Float[Tensor, "b t d"]:
        if self.form == "norm":
            (normed,) = self._final[0](x)
            return normed - x
        assert context.embedding is not None  # the model puts it there
        return context.embedding if self.injection is None else self.injection(x, context.embedding) - x

    def flops(self, tokens: int) -> float:
        return 0.0 if self.injection is None else 2.0 * self.injection.weight.numel()
