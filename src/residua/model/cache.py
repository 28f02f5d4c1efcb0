"""What decoding keeps between tokens: keys and values, short windows, convolution tails, and a design's `past`.

Depth state is rebuilt for every token and costs nothing here. A cache is made by `Cache()`, handed to every
forward, and grows there; the model itself remembers nothing. `Cache(rollback=n)` keeps enough to take back the last
n tokens, as speculative decoding does with the tokens it guessed wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.model.places import Places, plain
from residua.stream import Past


class Memory(ABC):
    """What one sublayer keeps."""

    @abstractmethod
    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep or repeat these batch rows."""

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Forget the newest tokens."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything held."""


M = TypeVar("M", bound=Memory)


class Cache:
    """The memory of one batch of sequences. Rows are aligned at their newest token: shorter ones are padded on the
    left, and the mask says so.

    rollback: how many tokens can be taken back. A short window and a convolution forget what they have passed, and
              keep this much more.
    """

    def __init__(self, *, rollback: int = 0) -> None:
        if rollback < 0:
            raise ValueError(f"Cache: rollback={rollback} must not be negative")
        self.margin = rollback
        self.length = 0
        """Tokens seen, padding included."""
        self.past: Past = None
        """What the residual design keeps."""
        self.places: Places | None = None
        """Of the newest tokens, where rows differ: padding or documents."""
        self._slots: dict[str, Memory] = {}
        self._peak = 0
        self._pasts: list[tuple[int, Past]] = []

    def slot(self, site: str, make: Callable[[], M]) -> M:
        """The memory of one sublayer, made when it is first asked for."""
        if site not in self._slots:
            self._slots[site] = make()
        return self._slots[site]  # type: ignore[return-value]  # what `make` of this sublayer made

    def advance(self, tokens: int, past: Past, places: Places | None) -> None:
        """Take in a forward of `tokens` columns: what the design keeps, and where the rows stand."""
        self.length += tokens
        self._peak = max(self._peak, self.length)
        self.past = past
        if self.margin and past is not None:
            kept = [(length, old) for length, old in self._pasts if self._oldest <= length < self.length]
            self._pasts = [*kept, (self.length, past)]
        if places is not None:
            columns = places if self.places is None else self.places.then(places)
            self.places = columns.last(self.margin + 1)

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens, as if they had never come."""
        length = self.length - tokens
        if tokens < 0 or length < self._oldest:
            raise ValueError(
                f"cannot take back {tokens} tokens: this cache of {self.length} tokens can go back to "
                f"{self._oldest}; make it with Cache(rollback=n) for n tokens"
            )
        if not tokens:
            return
        if self.past is not None:
            self._pasts = [(at, past) for at, past in self._pasts if at <= length]
            self.past = self._pasts[-1][1] if length else None
        if self.places is not None:
            rows, columns = self.places.positions.shape
            if tokens < columns:
                self.places = Places(*(x[:, : columns - tokens] for x in self.places))
            else:  # what is left came before rows differed
                self.places = plain(rows, length, self.places.positions.device)
        for memory in self._slots.values():
            memory.rollback(tokens)
        self.length = length

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep (or repeat) these batch rows: beam search."""
        for memory in self._slots.values():
            memory.select(rows)
        self.past, self.places, self._pasts = pytree.tree_map(
            lambda leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf,
            (self.past, self.places, self._pasts),
        )

    @property
    def nbytes(self) -> int:
        """Bytes in use, for all rows."""
        held = [tensor for memory in self._slots.values() for tensor in memory.tensors()]
        kept = [past for length, past in self._pasts if length < self.length]
        held += [leaf for leaf in pytree.tree_leaves((self.past, kept, self.places)) if leaf is not None]
        return sum(tensor.nbytes for tensor in held)

    @property
    def _oldest(self) -> int:
        """The shortest length to which every memory can go back."""
        return max(0, self._peak - self.margin)


class Grown(Memory):
    """Keys and values of every token so far, in buffers that double when they are full; positions where rows differ."""

    def __init__(self) -> None:
        self.length = 0
        self.buffers: tuple[Tensor, ...] = ()

    def append(
        self, k: Float[Tensor, "b kv t e"], v: Float[Tensor, "b kv t e"], positions: Int[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b kv n e"], Float[Tensor, "b kv n e"], Int[Tensor, "b n"] | None]:
        """Add the new tokens; all of them so far, as views."""
        new = (k, v) if positions is None else (k, v, positions[:, None, :, None])
        held = self.tensors()
        if self.length and len(new) > len(held):  # rows were alike until now
            at = torch.arange(self.length, device=k.device)[:, None].expand(len(k), 1, -1, 1)
            held, self.buffers = (*held, at), ()
        length = self.length + k.shape[2]
        if not self.buffers or length > self.buffers[0].shape[2]:
            size = max(length, 2 * self.length)
            self.buffers = tuple(x.new_empty(*x.shape[:2], size, x.shape[3]) for x in new)
            for old, buffer in zip(held, self.buffers, strict=False):
                buffer[:, :, : self.length] = old
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, :, self.length : length] = x
        self.length = length
        keys, values, *known = self.tensors()
        return keys, values, known[0][:, 0, :, 0] if known else None

    def select(self, rows: Tensor) -> None:
        self.buffers = tuple(buffer.index_select(0, rows) for buffer in self.buffers)

    def rollback(self, tokens: int) -> None:
        self.length -= tokens

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(buffer[:, :, : self.length] for buffer in self.buffers)


class Ring(Memory):
    """Keys and values of the last `window` tokens and of `margin` before them, token p in slot p mod (window + margin).

    Order in the ring does not matter to one new token: attention is told every slot's position, -1 for an empty one.
    """

    def __init__(self, window: int, margin: int = 0) -> None:
        self.window, self.size = window, window + margin
        self.length = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Tensor | None = None

    def extended(
        self, k: Float[Tensor, "b kv t e"], v: Float[Tensor, "b kv t e"], positions: Int[Tensor, "*b t"]
    ) -> tuple[Tensor, Tensor, Int[Tensor, "*b n"]]:
        """The window before the new tokens, in order, and these behind it: attend over them *before* writing, so that
        a chunk of any length sees what it overwrites."""
        if self.k is None or self.v is None or self.positions is None:
            return k, v, positions
        self._widen(positions)
        first = max(0, self.length - self.window + 1)
        slots = torch.arange(first, self.length, device=k.device) % self.size
        return (
            torch.cat([self.k.index_select(2, slots), k], 2),
            torch.cat([self.v.index_select(2, slots), v], 2),
            torch.cat([self.positions.index_select(-1, slots), positions], -1),
        )

    def write(self, k: Tensor, v: Tensor, positions: Int[Tensor, "*b t"]) -> tuple[Tensor, Tensor, Tensor]:
        """Put the new tokens in their slots; the ring as it is then."""
        if self.k is None or self.v is None or self.positions is None:
            self.k, self.v = (x.new_zeros(*x.shape[:2], self.size, x.shape[3]) for x in (k, v))
            self.positions = positions.new_full((*positions.shape[:-1], self.size), -1)
        self._widen(positions)
        tokens = k.shape[2]
        self.length += tokens
        if tokens == 1:
            slot = (self.length - 1) % self.size
            self.k[:, :, slot], self.v[:, :, slot] = k[:, :, 0], v[:, :, 0]
            self.positions[..., slot] = positions[..., 0]
        else:
            kept = min(tokens, self.size)
            slots = torch.arange(self.length - kept, self.length, device=k.device) % self.size
            self.k[:, :, slots], self.v[:, :, slots] = k[:, :, -kept:], v[:, :, -kept:]
            self.positions[..., slots] = positions[..., -kept:]
        return self.k, self.v, self.positions

    def select(self, rows: Tensor) -> None:
        if self.k is not None and self.v is not None and self.positions is not None:
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)
            if self.positions.ndim == 2:
                self.positions = self.positions.index_select(0, rows)

    def rollback(self, tokens: int) -> None:
        if self.positions is not None:
            slots = torch.arange(self.length - tokens, self.length, device=self.positions.device) % self.size
            self.positions[..., slots] = -1
        self.length -= tokens

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.k, self.v, self.positions) if x is not None)

    def _widen(self, positions: Tensor) -> None:
        """Positions of every row, from the first time that rows differ."""
        if self.positions is not None and positions.ndim > self.positions.ndim:
            self.positions = self.positions.repeat(len(positions), 1)


class Tail(Memory):
    """The last `size` inputs of a causal convolution or window, and `margin` before them; zeros before the first."""

    def __init__(self, size: int, margin: int = 0) -> None:
        self.size, self.kept = size, size + margin
        self.x: Tensor | None = None
        self.positions: Tensor | None = None

    def extended(
        self, x: Float[Tensor, "b t c"], positions: Int[Tensor, "*b t"]
    ) -> tuple[Float[Tensor, "b n c"], Int[Tensor, "*b n"]]:
        """The `size` inputs before `x`, then `x`; with their positions, -1 before the first. `x` is kept."""
        if self.x is None or self.positions is None:
            self.x = x.new_zeros(len(x), self.kept, x.shape[2])
            self.positions = positions.new_full((*positions.shape[:-1], self.kept), -1)
        elif positions.ndim > self.positions.ndim:
            self.positions = self.positions.repeat(len(x), 1)
        history, at = torch.cat([self.x, x], 1), torch.cat([self.positions, positions], -1)
        before = self.x.shape[1] - self.size
        if not self.kept:  # the window is the token itself
            return x, positions
        self.x, self.positions = (
            history[:, -self.kept :].clone(),
            at[..., -self.kept :].clone(),
        )  # not a view of a long text
        return history[:, before:], at[..., before:]

    def select(self, rows: Tensor) -> None:
        if self.x is not None and self.positions is not None:
            self.x = self.x.index_select(0, rows)
            if self.positions.ndim == 2:
                self.positions = self.positions.index_select(0, rows)

    def rollback(self, tokens: int) -> None:
        if self.x is not None and self.positions is not None:
            columns = self.x.shape[1] - tokens
            self.x, self.positions = self.x[:, :columns], self.positions[..., :columns]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.x, self.positions) if x is not None)
