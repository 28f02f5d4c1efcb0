"""`prepare`: a corpus and a tokenizer as two memory-mapped arrays of ids, every document closed by `end`.

fingerprint = SHA-256(documents and sides, tokenizer, format, versions that could change the ids)

Two runs with one fingerprint saw the same text in the same ids; runs with different ones do not compare.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from residua._version import __version__
from residua.cache import cache_root
from residua.lab.common.files import Record, Values, json_digest
from residua.lab.data.corpus import FORMAT, SIDES, Corpus, Texts, read_corpus
from residua.lab.data.source import DataError, source
from residua.lab.data.store import Entry, fetch
from residua.lab.data.tokenizer import Bytes, Tokenizer, choose, load_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Both sides as read-only ids, and everything needed to read and to cite them."""

    train: UInt[np.memmap, "train_tokens"] = field(repr=False)
    valid: UInt[np.memmap, "valid_tokens"] = field(repr=False)
    vocab: int
    """All ids, the specials included."""
    end: int
    """Closes every document."""
    mask: int
    train_bytes: int
    """UTF-8 bytes of the text of the train side, for bits per byte; `end` stands for none."""
    valid_bytes: int
    manifest: Record = field(repr=False)
    """JSON: source, licence, counts, hashes, versions and `fingerprint`."""
    tokenizer: Tokenizer = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without `end`."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, specials left out."""
        return self.tokenizer.decode(ids)


def prepare(
    corpus: str = "pydoc",
    tokenizer: str | Tokenizer = "bytes",
    *,
    cache: Path | None = None,
    progress: Say | None = None,
) -> Tokens:
    """The tokens of a corpus: made now, or taken from the cache and checked.

    corpus     pydoc, pycode, pysite, dir:PATH, file:GLOB or hf:NAME
    tokenizer  bytes, bpe:VOCAB (trained on the train side), hf:DIR (a folder with a tokenizer.json, or a hub name), or
               one made
    cache      the folder to keep what was made; `residua.cache.cache_root()` if not given
    progress   gets one line at a time; without it, only trouble is told, as a warning
    """
    say = progress or (lambda line: None)
    warn = progress or (lambda line: warnings.warn(line, stacklevel=2))
    root = cache or cache_root()
    where = source(corpus)
    make = choose(tokenizer)
    texts = read_corpus(where, root, say, warn)
    say(f"corpus {corpus}: {where.origin}; licence: {texts.record['licence']}")
    pieces = _tokenizer(tokenizer, make, texts, root, say, warn)
    fingerprint = json_digest([texts.content, pieces.hash, FORMAT, _versions(texts, pieces)])
    entry = fetch(root / "tokens" / f"{fingerprint[:32]}.safetensors", lambda: _encode(texts, pieces, say), warn)
    if not entry.record["exact"]:
        warn(f"tokenizer {pieces.name} does not give every text back as it was: its bits per byte flatter it")
    return Tokens(
        train=entry.arrays["train"],
        valid=entry.arrays["valid"],
        vocab=pieces.vocab,
        end=pieces.end,
        mask=pieces.mask,
        train_bytes=_size(texts.sides["train"]),
        valid_bytes=_size(texts.sides["valid"]),
        manifest=_manifest(texts, pieces, entry, fingerprint),
        tokenizer=pieces,
    )


def check_data(corpus: str, tokenizer: str | Tokenizer) -> None:
    """Refuse a corpus or a tokenizer that `prepare` would refuse, as far as that shows without reading the text."""
    source(corpus)
    choose(tokenizer)


def _tokenizer(
    name: str | Tokenizer, make: Callable[..., Tokenizer], texts: Corpus, root: Path, say: Say, warn: Say
) -> Tokenizer:
    """Trained ones are kept under the corpus, the size and the version of the trainer; the others cost nothing."""
    if isinstance(name, Tokenizer) or not name.startswith("bpe:"):
        return make(texts.sides["train"], texts.source.name)

    def train() -> tuple[Values, dict[str, np.ndarray]]:
        say(f"training {name} on {_size(texts.sides['train']):,} bytes")
        made = make(texts.sides["train"], texts.source.name)
        return {"tokenizer": name}, {"json": np.frombuffer(made.dump().encode(), dtype=np.uint8)}

    key = json_digest([texts.content, name, FORMAT, metadata.version("tokenizers")])
    entry = fetch(root / "tokenizers" / f"{name.replace(':', '-')}-{key[:32]}.safetensors", train, warn)
    return load_tokenizer(entry.arrays["json"].tobytes().decode())


def _encode(texts: Corpus, pieces: Tokenizer, say: Say) -> tuple[Values, dict[str, np.ndarray]]:
    arrays = {}
    for side in SIDES:
        say(f"encoding {len(texts.sides[side]):,} {side} documents with {pieces.name}")
        arrays[side] = _pack(texts.sides[side], pieces)
    return {"exact": all(pieces.decode(pieces.encode(text)) == text for text in texts.sides["valid"])}, arrays


def _pack(texts: Texts, pieces: Tokenizer) -> np.ndarray:
    end = np.array([pieces.end], dtype=pieces.dtype)
    packed: list[np.ndarray] = []
    for ids in pieces.encode_all(texts):
        if np.isin(ids, (pieces.end, pieces.mask)).any():
            raise DataError(f"tokenizer {pieces.name} encodes plain text to its end or mask token; use another one")
        packed += (ids.astype(pieces.dtype), end)
    return np.concatenate(packed)


def _versions(texts: Corpus, pieces: Tokenizer) -> dict[str, str]:
    """The versions that could change the ids of the same spec: equal text and bytes need none."""
    versions = {"python": platform.python_version()} if texts.source.python else {}
    return versions if isinstance(pieces, Bytes) else versions | {"tokenizers": metadata.version("tokenizers")}


def _manifest(texts: Corpus, pieces: Tokenizer, entry: Entry, fingerprint: str) -> Values:
    known = {key: value for key, value in texts.record.items() if key not in ("content", "licence")}
    return {
        "corpus": texts.source.name,
        "source": texts.source.origin,
        "licence": texts.record["licence"],
        "content": texts.content,
        "documents": {side: len(texts.sides[side]) for side in SIDES},
        "bytes": {side: _size(texts.sides[side]) for side in SIDES},
        "tokens": {side: len(entry.arrays[side]) for side in SIDES},
        "reading": known,
        "tokenizer": {
            "name": pieces.name,
            "hash": pieces.hash,
            "vocab": pieces.vocab,
            "end": pieces.end,
            "mask": pieces.mask,
            "exact": entry.record["exact"],
        },
        "versions": {
            "python": platform.python_version(),
            "residua": __version__,
            "tokenizers": metadata.version("tokenizers"),
            "numpy": np.__version__,
        },
        "format": FORMAT,
        "fingerprint": fingerprint,
    }


def _size(texts: Texts) -> int:
    return int(texts.ends[-1])
