"""What the sublayers of one forward share: where the tokens stand, what is padding, and the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from residua.model.cache import Cache, Tail
from residua.model.places import Places
from residua.ops.window_attend.position import apart


@dataclass(frozen=True, slots=True)
class Context:
    """What every sublayer of one forward shares."""

    positions: Int[Tensor, " t"] | Int[Tensor, "b t"]
    """In the token's own document; one row of them where all rows are alike."""
    rotation: tuple[Float[Tensor, "*b t e"], Float[Tensor, "*b t e"]]
    """Cosines and sines of the rotary positions."""
    causal: bool
    mask: Bool[Tensor, "b t"] | None = None
    """True for tokens, False for padding."""
    cache: Cache | None = None
    places: Places | None = None
    """Documents and positions, where rows have padding or more than one document."""
    embedding: Float[Tensor, "b t d"] | None = None
    """What the stream opened with, for a loop that adds it again."""
    lap: int = 0
    """The pass over the block that is running."""

    @property
    def documents(self) -> Int[Tensor, "b t"] | None:
        """The document of every token, -1 for padding; None where each row is one document without padding."""
        if self.places is None or self.mask is None:
            return None
        return torch.where(self.mask, self.places.documents, -1)

    @property
    def length(self) -> int:
        """Tokens up to the last of this forward."""
        return self.positions.shape[-1] + (0 if self.cache is None else self.cache.length)

    def slot(self, name: str) -> str:
        """Where a sublayer keeps what this pass leaves: passes do not share a cache."""
        return f"{name}@{self.lap}" if self.lap else name

    def apart(self, window: int) -> Int[Tensor, " t"] | Int[Tensor, "b t"]:
        """Positions for a window of `window` tokens, which reaches into no other document."""
        documents = self.documents
        return self.positions if documents is None else apart(self.positions, documents, window)

    def history(
        self, x: Float[Tensor, "b t c"], window: int, slot: str
    ) -> tuple[Float[Tensor, "b n c"], Int[Tensor, "*b n"]]:
        """`x` with the `window - 1` tokens before it that a slot of the cache keeps, and their positions: zeros at
        position -1 before the first. Without a cache there is nothing before `x`."""
        at = self.apart(window)
        if self.cache is None:
            return x, at
        margin = self.cache.margin
        return self.cache.slot(self.slot(slot), lambda: Tail(window - 1, margin)).extended(x, at)
