"""What decoding keeps between tokens: keys and values, short windows, convolution tails, and a design's `past`.

Depth state is rebuilt for every token and costs nothing here. A cache is made by `Cache()`, handed to every
forward, and grows there; the model itself remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

S = TypeVar("S")


class Cache:
    """The memory of one batch of sequences, all of the same length."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens seen."""
        self.past: Any = None
        """What the residual design keeps."""
        self._slots: dict[str, Any] = {}

    def slot(self, site: str, make: Callable[[], S]) -> S:
        """The memory of one sublayer, made when it is first asked for."""
        if site not in self._slots:
            self._slots[site] = make()
        return self._slots[site]

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep (or repeat) these batch rows: beam search."""
        for memory in self._slots.values():
            memory.select(rows)
        self.past = pytree.tree_map(lambda leaf: leaf.index_select(0, rows), self.past)

    @property
    def nbytes(self) -> int:
        """Bytes in use, for all rows."""
        held = [tensor for memory in self._slots.values() for tensor in memory.tensors()]
        return sum(tensor.nbytes for tensor in (*held, *pytree.tree_leaves(self.past)) if tensor is not None)


class Grown:
    """Keys and values of every token so far, in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self.buffers: tuple[Tensor, Tensor] | None = None

    def append(
        self, k: Float[Tensor, "b kv t e"], v: Float[Tensor, "b kv t e"]
    ) -> tuple[Float[Tensor, "b kv n e"], Float[Tensor, "b kv n e"]]:
        """Add the new tokens; all of them so far, as views."""
        new = self.length + k.shape[2]
        if self.buffers is None or new > self.buffers[0].shape[2]:
            size = max(new, 2 * self.length)
            grown = tuple(x.new_empty(*x.shape[:2], size, x.shape[3]) for x in (k, v))
            for old, buffer in zip(self.tensors(), grown, strict=False):
                buffer[:, :, : self.length] = old
            self.buffers = grown  # type: ignore[assignment]
        assert self.buffers is not None
        for buffer, x in zip(self.buffers, (k, v), strict=True):
            buffer[:, :, self.length : new] = x
        self.length = new
        keys, values = self.tensors()
        return keys, values

    def select(self, rows: Tensor) -> None:
        if self.buffers is not None:
            self.buffers = tuple(buffer.index_select(0, rows) for buffer in self.buffers)  # type: ignore[assignment]

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.buffers is None else tuple(buffer[:, :, : self.length] for buffer in self.buffers)


class Ring:
    """Keys and values of the last `window` tokens, token p in slot p mod window; `positions` -1 is empty.

    Order in the ring does not matter: attention is told every slot's position.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor, positions: Int[Tensor, " t"]) -> tuple[Tensor, Tensor, Int[Tensor, " n"]]:
        """The ring and the new tokens behind it: attend over these *before* writing, so that a chunk of any
        length sees what it overwrites."""
        if self.k is None or self.v is None or self.positions is None:
            return k, v, positions
        return (
            torch.cat([self.k, k], 2),
            torch.cat([self.v, v], 2),
            torch.cat([self.positions, positions]),
        )

    def write(self, k: Tensor, v: Tensor, positions: Int[Tensor, " t"]) -> None:
        """Put the last `window` of the new tokens in their slots."""
        if self.k is None or self.v is None or self.positions is None:
            self.k, self.v = (x.new_zeros(*x.shape[:2], self.window, x.shape[3]) for x in (k, v))
            self.positions = positions.new_full((self.window,), -1)
        k, v, positions = k[:, :, -self.window :], v[:, :, -self.window :], positions[-self.window :]
        slots = positions % self.window
        self.k[:, :, slots] = k
        self.v[:, :, slots] = v
        self.positions[slots] = positions

    def select(self, rows: Tensor) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.k, self.v, self.positions) if x is not None)


class Tail:
    """The last k - 1 inputs of a causal convolution."""

    def __init__(self) -> None:
        self.tail: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        if self.tail is not None:
            self.tail = self.tail.index_select(0, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.tail is None else (self.tail,)
