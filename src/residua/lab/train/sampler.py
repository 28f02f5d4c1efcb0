"""batch(seed, step): which tokens an update sees is a function of the seed and the step alone.

Nothing is remembered, so a resumed run needs no sampler state; the design is no argument, so every design sees the
same batches; and a rank takes its rows out of the same global batch, so any number of ranks sees the same tokens.

A pass over the corpus cuts it into windows of `context` tokens from an offset of its own and takes each window once,
in an order given by a keyed permutation that is computed, not stored.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from residua.lab.common.files import Record
from residua.lab.train.recipe import Recipe
from residua.model.objective import IGNORED, mask_tokens


class Tokens(Protocol):
    """What training needs of a tokenized corpus; `residua.lab.data.prepare` makes one."""

    @property
    def train(self) -> NDArray[np.integer]: ...
    @property
    def valid(self) -> NDArray[np.integer]: ...
    @property
    def vocab(self) -> int: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def valid_bytes(self) -> int: ...
    @property
    def manifest(self) -> Record: ...


class Batch(NamedTuple):
    """Inputs, and what each position should answer; `IGNORED` where it is not asked."""

    inputs: Int[Tensor, "b t"]
    targets: Int[Tensor, "b t"]

    @property
    def counted(self) -> int:
        """Positions that count."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch elsewhere."""
        return Batch(self.inputs.to(device), self.targets.to(device))


class Batches(ABC):
    """What the loop is fed: the rows of every update, and a validation set that stays the same."""

    vocab: int
    """Token ids are 0 to vocab - 1."""
    tokens_per_byte: float = 1.0
    """Of the validation set: turns nats per token into bits per byte."""

    @abstractmethod
    def batches(self, step: int) -> list[Batch]:
        """The rows of every forward pass of one update."""

    @abstractmethod
    def validation(self) -> Iterator[Batch]:
        """The validation set."""

    def passes(self, tokens: int) -> float:
        """How often `tokens` tokens are the training split; 0 where rows are drawn and none comes again."""
        return 0.0


class Sampler(Batches):
    """The batches of a run on a corpus, and its fixed validation set."""

    def __init__(self, config: Recipe, tokens: Tokens, *, rank: int = 0, ranks: int = 1) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks")
        if config.batch % ranks:
            raise ValueError(f"batch {config.batch} does not split over {ranks} ranks; choose a multiple")
        for split in ("train", "valid"):
            held = len(getattr(tokens, split))
            if held < config.context + 1:
                raise ValueError(
                    f"the {split} split of {config.corpus} has {held} tokens, fewer than one window of context + 1 = "
                    f"{config.context + 1}; choose a smaller context or a larger corpus"
                )
        if config.masked and tokens.mask is None:
            raise ValueError(f"objective=mlm needs a mask token, and tokenizer {config.tokenizer} has none")
        self.config, self.tokens, self.vocab = config, tokens, tokens.vocab
        self.tokens_per_byte = len(tokens.valid) / tokens.valid_bytes  # of the whole split
        self.rank, self.ranks = rank, ranks
        self.windows = max(1, len(tokens.train) // config.context - 1)
        """Windows in one pass; one fewer than fit, to leave room for the pass's offset."""

    def batches(self, step: int) -> list[Batch]:
        """This rank's rows of every forward pass of one update."""
        config = self.config
        share = config.batch // self.ranks
        made = []
        for turn in range(config.accumulate):
            first = (step * config.accumulate + turn) * config.batch + self.rank * share
            keys = [_key(config.seed, "mask", first + row) for row in range(share)]
            made.append(self._rows(self.tokens.train, self.starts(first, share), keys))
        return made

    def validation(self) -> Iterator[Batch]:
        """The validation set: windows spread evenly over the split, whatever the seed, the design and the batch."""
        config, ids = self.config, self.tokens.valid
        starts = spread(len(ids), config.context, config.eval_windows)
        for first in range(0, len(starts), config.batch):
            chosen = starts[first : first + config.batch]
            yield self._rows(ids, chosen, [_key(0, "valid", start) for start in chosen])

    def passes(self, tokens: int) -> float:
        return tokens / len(self.tokens.train)

    def starts(self, first: int, count: int) -> list[int]:
        """Where the windows of the samples first, first + 1, ... begin in the training split."""
        config, samples = self.config, np.arange(first, first + count)
        found = np.empty(count, dtype=np.int64)
        turns = samples // self.windows
        for turn in np.unique(turns):
            here = turns == turn
            slack = len(self.tokens.train) - 1 - self.windows * config.context
            offset = _key(config.seed, "offset", int(turn)) % (min(slack, config.context - 1) + 1)
            order = permuted(samples[here] % self.windows, self.windows, _key(config.seed, "order", int(turn)))
            found[here] = offset + order * config.context
        return [int(start) for start in found]

    def _rows(self, ids: NDArray[np.integer], starts: list[int], keys: list[int]) -> Batch:
        """Windows as a batch; each row draws what it hides from a key of its own, so that no grouping matters."""
        batch = windows(ids, starts, self.config.context)
        if not self.config.masked:
            return batch
        assert self.tokens.mask is not None  # checked when the sampler was made
        hidden = [
            mask_tokens(
                row[None],
                mask_id=self.tokens.mask,
                vocab=self.tokens.vocab,
                generator=torch.Generator().manual_seed(key),
            )
            for row, key in zip(batch.inputs, keys, strict=True)
        ]
        inputs, targets = zip(*hidden, strict=True)
        return Batch(torch.cat(inputs), torch.cat(targets))


def windows(ids: NDArray[np.integer], starts: Sequence[int], context: int) -> Batch:
    """The `context` tokens from each start on, and the token after each of them."""
    whole = torch.from_numpy(np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64))
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())


def spread(tokens: int, context: int, windows: int = 0) -> list[int]:
    """Where `windows` windows of `context` tokens, spread evenly over a split, begin; 0 or too many: all that fit."""
    held = (tokens - 1) // context
    count = min(windows or held, held)
    return [(2 * i + 1) * held // (2 * count) * context for i in range(count)]


def checksum(batches: list[Batch]) -> str:
    """A few letters that two runs share when an update of theirs saw the same inputs and targets."""
    sums, sizes = crcs(batches)
    return joined_checksum([sums], sizes)


def joined_checksum(parts: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """`checksum` of a global batch from the CRCs of its shares. parts: of every share, the CRC of each tensor in order
    (inputs and targets of every forward pass); sizes: bytes of each of these, the same in all shares."""
    crc = 0
    for place, size in enumerate(sizes):
        for share in parts:
            crc = _appended(crc, share[place], size)
    return f"{crc:08x}"


def crcs(batches: list[Batch]) -> tuple[list[int], list[int]]:
    """The CRC of every tensor of an update, and its bytes."""
    tensors = [tensor for batch in batches for tensor in batch]
    return [zlib.crc32(each.numpy().data) for each in tensors], [each.nbytes for each in tensors]


def _appended(first: int, second: int, size: int) -> int:
    """The CRC of A then B, from that of A, that of B and the bytes of B: crc(A) x^(8 size) + crc(B), modulo the CRC's
    polynomial."""
    return _multiplied(_shift(size), first) ^ second


@lru_cache(maxsize=64)
def _shift(size: int) -> int:
    """x^(8 size)."""
    power, base = 1 << 31, 1 << 23  # 1 and x^8, highest powers in the lowest bits
    while size:
        if size & 1:
            power = _multiplied(power, base)
        base = _multiplied(base, base)
        size >>= 1
    return power


def _multiplied(left: int, right: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            found ^= right
        right = right >> 1 ^ (0xEDB88320 if right & 1 else 0)
    return found


def permuted(index: NDArray[np.int64], count: int, key: int) -> NDArray[np.int64]:
    """Where a keyed permutation of 0 .. count - 1 sends each index, without storing it.

    Four Feistel rounds permute the next power of four; an index sent out of range is sent on until it is in range.
    """
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    low = np.uint64((1 << half) - 1)
    keys = [np.uint64(_key(key, "round", turn)) for turn in range(4)]
    out = index.astype(np.uint64)
    moving = np.ones(len(out), dtype=bool)
    while moving.any():
        left, right = out[moving] >> np.uint64(half), out[moving] & low
        for one in keys:
            left, right = right, left ^ (_mixed(right ^ one) & low)
        out[moving] = (left << np.uint64(half)) | right
        moving = out >= count
    return out.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, label: str, number: int) -> int:
    """63 bits of their own for every use of the seed."""
    digest = hashlib.sha256(f"{seed}/{label}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
