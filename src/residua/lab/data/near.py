"""Near-duplicates by MinHash: group(i) = group(j) when i and j share most of their shingles.

A shingle is 12 bytes in a row of the document in lower case with its white space left out, so that a change of
indentation or of line breaks changes nothing. For 60 random r, signature_r = min over shingles of (hash xor r);
the share of equal signatures estimates the Jaccard similarity J. Documents that agree on all of one of 20 bands of
3 signatures are candidates, and are joined if 40 % of all 60 agree, which keeps chains of chance agreements from
growing. A pair is joined with probability .0002 at J = .2, .05 at .3, .48 at .4, .90 at .5, .99 at .6 and above
.999 from .7 on. Joining is transitive.

A text quoted inside a much longer one is not found: J is then small, though all of the shorter one is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int, UInt32, UInt64

from residua.lab.data.source import in_batches

SHINGLE = 12
BANDS, ROWS = 20, 3
ALIKE = 0.4
_BATCH = 4 << 20
_WHITE = b" \t\r\n\f\v"
_LOWER = bytes(range(256)).lower()
_PRIME = 0x9E3779B97F4A7C15


def groups(documents: Sequence[bytes]) -> Int[np.ndarray, "documents"]:
    """For every document the index of the first document of its group."""
    parent = np.arange(len(documents))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    seen = signatures(documents)
    for left, right in _candidates(seen):
        alike = (seen[left] == seen[right]).mean(axis=1) >= ALIKE
        for pair in zip(left[alike].tolist(), right[alike].tolist(), strict=True):
            low, high = sorted(map(root, pair))
            parent[high] = low
    return np.array([root(index) for index in range(len(documents))], dtype=np.int64)


def signatures(documents: Sequence[bytes]) -> UInt32[np.ndarray, "documents signatures"]:
    """The MinHash signatures of every document."""
    seeds = np.random.default_rng(0).integers(1 << 32, size=BANDS * ROWS, dtype=np.uint32)
    found = [np.empty((0, len(seeds)), dtype=np.uint32)]
    texts = (document.translate(_LOWER, _WHITE).ljust(SHINGLE, b"\0") for document in documents)
    for batch in in_batches(texts, _BATCH):
        lengths = np.array([len(text) for text in batch])
        hashes = _windows(np.frombuffer(b"".join(batch), dtype=np.uint8))
        inside = np.ones(len(hashes), dtype=bool)
        for end in np.cumsum(lengths)[:-1].tolist():
            inside[end - SHINGLE + 1 : end] = False
        hashes = hashes[inside]
        starts = np.concatenate(([0], np.cumsum(lengths - SHINGLE + 1)[:-1]))
        found.append(np.stack([np.minimum.reduceat(hashes ^ seed, starts) for seed in seeds], axis=1))
    return np.concatenate(found)


def _windows(text: np.ndarray) -> UInt32[np.ndarray, "windows"]:
    """A hash of every 12 bytes in a row: of 2, 4 and 8 by joining halves, then of 8 and 4; mixed at the end."""

    def join(left: UInt64[np.ndarray, "l"], right: UInt64[np.ndarray, "r"], width: int) -> UInt64[np.ndarray, "w"]:
        factor = np.uint64(pow(_PRIME, width, 1 << 64))
        return left[: len(right)] * factor + right

    one = text.astype(np.uint64)
    two = join(one, one[1:], 1)
    four = join(two, two[2:], 2)
    eight = join(four, four[4:], 4)
    mixed = join(eight, four[8:], 4)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def _candidates(
    seen: UInt32[np.ndarray, "documents signatures"],
) -> Iterator[tuple[Int[np.ndarray, "pairs"], Int[np.ndarray, "pairs"]]]:
    """For every band, each document paired with the first and with the previous one that agrees on the band."""
    for band in range(BANDS):
        rows = seen[:, band * ROWS : (band + 1) * ROWS]
        order = np.lexsort(rows.T)
        new = np.ones(len(order), dtype=bool)
        new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
        places = np.flatnonzero(~new)
        first = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        for partner in (first[places], places - 1):
            yield order[partner], order[places]
