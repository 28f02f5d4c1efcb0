"""A corpus, read, cleaned and split: exact duplicates and empty documents gone, near-duplicates on one side.

The text is kept in the cache, memory-mapped, under a hash of what it was read from; it is held in memory once, while
it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from residua.lab.common.files import Record, Values
from residua.lab.data.near import groups
from residua.lab.data.source import DataError, Source, Tally
from residua.lab.data.store import fetch

FORMAT = 1
"""Counts the changes of the split and of the cached layout: part of every key and fingerprint."""

VALID_SHARE = 0.05
SIDES = ("train", "valid")


@dataclass(frozen=True, eq=False)
class Texts:
    """The documents of one side, laid end to end."""

    text: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield self.text[start:end].tobytes().decode()
            start = end


@dataclass(frozen=True, eq=False)
class Corpus:
    """Both sides and what is known of them."""

    source: Source
    sides: Mapping[str, Texts]
    content: str
    """A hash of every document and of the side it is on."""
    record: Record
    """JSON: what was read and what was left out."""


def read_corpus(source: Source, root: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> Corpus:
    """The corpus of a source, from the cache or made now."""
    path = root / "corpora" / f"{source.name.partition(':')[0]}-{FORMAT}-{source.key()[:32]}.safetensors"
    entry = fetch(path, lambda: _make(source, say), warn)
    record = entry.record
    if record["undecodable"]:
        warn(
            f"corpus {source.name}: {record['undecodable']} documents are not UTF-8 text and are left out, "
            f"the first is {record['first_undecodable']}"
        )
    sides = {side: Texts(entry.arrays[side], entry.arrays[f"{side}_ends"]) for side in SIDES}
    return Corpus(source, sides, record["content"], record)


def _make(source: Source, say: Callable[[str], None]) -> tuple[Values, dict[str, np.ndarray]]:
    say(f"reading {source.name}: {source.origin}")
    tally = Tally()
    found: dict[bytes, bytes] = {}
    read = empty = 0
    for document in source.documents(tally):
        read += 1
        if document.isspace() or not document:
            empty += 1
        else:
            found.setdefault(hashlib.sha256(document).digest(), document)
    if not found:
        count = read + len(tally.undecodable)
        bad = f", {len(tally.undecodable)} are not UTF-8 text" if tally.undecodable else ""
        raise DataError(
            f"corpus {source.name} is empty: of {count} documents {empty} are blank{bad}; give files with text"
        )
    digests, documents = list(found), list(found.values())
    say(f"looking for near-duplicates among {len(documents):,} documents")
    group = groups(documents)
    valid = validation(digests, [len(document) for document in documents], group)
    if not valid.any():
        why = "it is one document" if len(documents) == 1 else f"its {len(documents)} documents are near-duplicates"
        raise DataError(f"corpus {source.name} is too small to split: {why}; give two or more files that differ")
    arrays: dict[str, np.ndarray] = {}
    content = hashlib.sha256()
    for side, members in zip(SIDES, (np.flatnonzero(~valid), np.flatnonzero(valid)), strict=True):
        chosen = [documents[index] for index in members.tolist()]
        arrays[side] = np.frombuffer(b"".join(chosen), dtype=np.uint8)
        arrays[f"{side}_ends"] = np.cumsum([len(document) for document in chosen], dtype=np.uint64)
        content.update(len(chosen).to_bytes(8, "little") + b"".join(digests[index] for index in members.tolist()))
    _, members_of_group = np.unique(group, return_counts=True)
    record = {
        "content": content.hexdigest(),
        "licence": tally.licence or source.licence,
        "read": read + len(tally.undecodable),
        "blank": empty,
        "undecodable": len(tally.undecodable),
        "first_undecodable": tally.undecodable[0] if tally.undecodable else None,
        "duplicates": read - empty - len(documents),
        "near_duplicate_groups": int((members_of_group > 1).sum()),
    }
    return record, arrays


def validation(
    digests: Sequence[bytes], sizes: Sequence[int], group: Int[np.ndarray, "documents"]
) -> Bool[np.ndarray, "documents"]:
    """Which documents are for validation; none if there is but one group.

    The hash of a group is the least SHA-256 of its documents. Groups are taken for validation in that order until 5
    % of the bytes are reached, as nearly as whole groups allow: a threshold on the hash would leave many a small
    corpus without validation, and looking for groups that fill the last gap would fill it with small ones. A group
    above 5 % stays in training; if all are, the smallest one is the validation side.
    """
    least: dict[int, bytes] = {}
    size: dict[int, int] = {}
    for index, name in enumerate(group.tolist()):
        least[name] = min(least.get(name, digests[index]), digests[index])
        size[name] = size.get(name, 0) + sizes[index]
    target = VALID_SHARE * sum(sizes)
    chosen: set[int] = set()
    taken = 0
    for name in sorted(least, key=least.__getitem__):
        if size[name] <= target:
            if abs(taken + size[name] - target) >= abs(taken - target):
                break
            chosen.add(name)
            taken += size[name]
    if not chosen and len(least) > 1:
        chosen.add(min(least, key=lambda name: (size[name], least[name])))
    return np.isin(group, sorted(chosen))
