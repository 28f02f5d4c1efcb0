"""What decoding keeps between tokens: keys and values, short windows, convolution tails, and a design's `past`.

Depth state is rebuilt for every token and costs nothing here. A cache is made by `Cache()`, handed to every
forward, and grows there; the model itself remembers nothing. `Cache(rollback=n)` keeps enough to take back the last
n tokens, as speculative decoding does with the tokens it guessed wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.model.places import Places, plain
from residua.ops.window_attend.position import rotations
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
        self._turns: tuple[Any, tuple[Tensor, ...]] = None, ()
        self._peak = 0
        self._pasts: list[tuple[int, Past]] = []

    def slot(self, site: str, make: Callable[[], M]) -> M:
        """The memory of one sublayer, made when it is first asked for."""
        if site not in self._slots:
            self._slots[site] = make()
        return self._slots[site]  # type: ignore[return-value]  # what `make` of this sublayer made

    def turns(
        self, tokens: int, width: int, base: float, dtype: torch.dtype, device: torch.device
    ) -> tuple[Int[Tensor, " t"], tuple[Float[Tensor, "t half"], Float[Tensor, "t half"]]]:
        """Positions and rotations of the next tokens where rows are alike: out of a table that doubles when it ends,
        because for one token they take longer to make than to look up."""
        after, of = self.length + tokens, (width, base, dtype, device)
        made, table = self._turns
        if made != of or after > len(table[0]):
            positions = torch.arange(after if made != of else 2 * after, device=device)
            table = (positions, *rotations(positions, width, base, dtype))
            self._turns = of, table
        positions, cosine, sine = [x[self.length : after] for x in table]
        return positions, (cosine, sine)

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
            self._grow(held, new, length)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, :, self.length : length] = x
        self.length = length
        keys, values, *known = self.tensors()
        return keys, values, known[0][:, 0, :, 0] if known else None

    def place(
        self, like: Float[Tensor, "b 1 _"], heads: int, width: int
    ) -> tuple[Float[Tensor, "b kv room e"], Float[Tensor, "b kv room e"], int]:
        """Room for one token more where rows are alike: the buffers, and its place there, which the caller fills."""
        before = self.length
        if not self.buffers or before == self.buffers[0].shape[2]:
            one = like.new_empty(like.shape[0], heads, 1, width)
            self._grow(self.tensors(), (one, one), before + 1)
        self.length = before + 1
        keys, values = self.buffers
        return keys, values, before

    def _grow(self, held: tuple[Tensor, ...], new: tuple[Tensor, ...], length: int) -> None:
        """Larger buffers, with what is held in them."""
        size = max(length, 2 * self.length)
        self.buffers = tuple(x.new_empty(*x.shape[:2], size, x.shape[3]) for x in new)
        for old, buffer in zip(held, self.buffers, strict=False):
            buffer[:, :, : self.length] = old

    def select(self, rows: Tensor) -> None:
        self.buffers = tuple(buffer.index_select(0, rows) for buffer in self.buffers)

    def rollback(self, tokens: int) -> None:
        self.length -= tokens

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(buffer[:, :, : self.length] for buffer in self.buffers)


class Placed(Memory):
    """Tensors of the newest tokens and their positions: one row of them while all rows are alike, -1 where empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: tuple[Tensor, ...] = ()
        self.positions: Tensor | None = None

    def known(self, positions: Int[Tensor, "*b t"]) -> Int[Tensor, "*b n"]:
        """The positions held, of every row from the first time that rows differ."""
        if self.positions is None:
            self.positions = positions.new_full((*positions.shape[:-1], self.size), -1)
        elif positions.ndim > self.positions.ndim:
            self.positions = self.positions.repeat(len(positions), 1)
        return self.positions

    def select(self, rows: Tensor) -> None:
        self.held = tuple(x.index_select(0, rows) for x in self.held)
        if self.positions is not None and self.positions.ndim == 2:
            self.positions = self.positions.index_select(0, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.held if self.positions is None else (*self.held, self.positions)


class Ring(Placed):
    """Keys and values of the last `window` tokens and of `margin` before them, token p in slot p mod (window + margin).

    Order in the ring does not matter to one new token: attention is told every slot's position, -1 for an empty one.
    """

    def __init__(self, window: int, margin: int = 0) -> None:
        super().__init__(window + margin)
        self.window, self.length = window, 0

    def extended(
        self, k: Float[Tensor, "b kv t e"], v: Float[Tensor, "b kv t e"], positions: Int[Tensor, "*b t"]
    ) -> tuple[Tensor, Tensor, Int[Tensor, "*b n"]]:
        """The window before the new tokens, in order, and these behind it: attend over them *before* writing, so that
        a chunk of any length sees what it overwrites."""
        if not self.held:
            return k, v, positions
        first = max(0, self.length - self.window + 1)
        slots = torch.arange(first, self.length, device=k.device) % self.size
        keys, values = (torch.cat([x.index_select(2, slots), new], 2) for x, new in zip(self.held, (k, v), strict=True))
        return keys, values, torch.cat([self.known(positions).index_select(-1, slots), positions], -1)

    def write(self, k: Tensor, v: Tensor, positions: Int[Tensor, "*b t"]) -> tuple[Tensor, Tensor, Tensor]:
        """Put the new tokens in their slots; the ring as it is then."""
        self.held = self.held or tuple(x.new_zeros(*x.shape[:2], self.size, x.shape[3]) for x in (k, v))
        (keys, values), known = self.held, self.known(positions)
        tokens = k.shape[2]
        self.length += tokens
        if tokens == 1:
            slot = (self.length - 1) % self.size
            keys[:, :, slot], values[:, :, slot] = k[:, :, 0], v[:, :, 0]
            known[..., slot] = positions[..., 0]
        else:
            kept = min(tokens, self.size)
            slots = torch.arange(self.length - kept, self.length, device=k.device) % self.size
            keys[:, :, slots], values[:, :, slots] = k[:, :, -kept:], v[:, :, -kept:]
            known[..., slots] = positions[..., -kept:]
        return keys, values, known

    def rollback(self, tokens: int) -> None:
        if self.positions is not None:
            slots = torch.arange(self.length - tokens, self.length, device=self.positions.device) % self.size
            self.positions[..., slots] = -1
        self.length -= tokens


class Tail(Placed):
    """The last `window` inputs of a causal convolution or window, and `margin` before them; zeros before the first."""

    def __init__(self, window: int, margin: int = 0) -> None:
        super().__init__(window + margin)
        self.window = window

    def extended(
        self, x: Float[Tensor, "b t c"], positions: Int[Tensor, "*b t"]
    ) -> tuple[Float[Tensor, "b n c"], Int[Tensor, "*b n"]]:
        """The `window` inputs before `x`, then `x`; with their positions, -1 before the first. `x` is kept."""
        (old,) = self.held or (x.new_zeros(len(x), self.size, x.shape[2]),)
        history, at = torch.cat([old, x], 1), torch.cat([self.known(positions), positions], -1)
        before = old.shape[1] - self.window
        if not self.size:  # the window is the token itself
            return x, positions
        # not views of a long text
        self.held, self.positions = (history[:, -self.size :].clone(),), at[..., -self.size :].clone()
        return history[:, before:], at[..., before:]

    def rollback(self, tokens: int) -> None:
        if self.held and self.positions is not None:
            columns = self.held[0].shape[1] - tokens
            self.held, self.positions = (self.held[0][:, :columns],), self.positions[..., :columns]
