"""Text to ids and back: `bytes`, `bpe:VOCAB` trained on the train split, or `hf:DIR`, a tokenizer that exists: in a
directory, or of a model of the hub by its name.

Every tokenizer has an id `end` that closes a document and an id `mask` for masked language modelling. Text that
spells a special token is text, and does not encode to it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from residua.lab.common.expect import expect
from residua.lab.common.files import Values, json_digest
from residua.lab.data.source import DataError, in_batches

SPECIALS = 2
"""end and mask."""
LEAST_BPE = 256 + SPECIALS + 1
"""Every byte, the specials and one merge."""
MOST_BPE = 1 << 20
_BATCH = 1 << 20

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
MASKS = ("[MASK]", "<mask>", "<|mask|>")
FILES = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")
"""What is read of a tokenizer that exists: itself, and what says which tokens are special."""
SLOW = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that are no tokenizer.json."""


class Tokenizer(ABC):
    """encode and decode, and which ids are what."""

    name: str
    """As the user wrote it."""
    vocab: int
    """All ids, the specials included."""
    end: int
    mask: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without `end`."""

    def begun(self, text: str) -> list[int]:
        """The ids of a text that a published model is to continue: with what its tokenizer puts before every text."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; specials are left out, and half a character becomes U+FFFD."""

    def special(self, index: int) -> str:
        """The name of an id that stands for no text."""
        return {self.end: "<end>", self.mask: "<mask>"}.get(index, "")

    @abstractmethod
    def dump(self) -> str:
        """JSON from which `load_tokenizer` makes this tokenizer again: for the directory of a run."""

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of every text."""
        for text in texts:
            yield np.array(self.encode(text), dtype=np.uint32)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that decides the ids: not of the name, which for a folder is where it lies."""
        return json_digest(json.loads(self.dump()) | {"name": ""})

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.dtype("<u2") if self.vocab <= 1 << 16 else np.dtype("<u4")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        for index in ids:
            if not 0 <= index < self.vocab:
                raise ValueError(f"tokenizer {self.name} has ids 0 to {self.vocab - 1}, not {index}")
        return [int(index) for index in ids]


class Bytes(Tokenizer):
    """id = byte of the UTF-8 text; 256 ends a document, 257 masks."""

    name = "bytes"
    end, mask, vocab = 256, 257, 256 + SPECIALS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in self._checked(ids) if index < 256).decode(errors="replace")

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)

    def dump(self) -> str:
        return json.dumps({"name": self.name})


class Pieces(Tokenizer):
    """A tokenizer of the `tokenizers` package, given as its JSON."""

    def __init__(self, name: str, text: str, end: int | None = None, mask: int | None = None) -> None:
        from tokenizers import Tokenizer as Library

        self.name = name
        self._text = text
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the package raises a bare Exception for what it cannot read
            raise DataError(f"tokenizer {name}: its JSON cannot be read ({_line(error)})") from error
        # a text that spells <|endoftext|> is text: only the packer writes specials
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        size = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        self._own = size
        self.end = size if end is None else end
        self.mask = max(size, self.end + 1) if mask is None else mask
        self.vocab = max(size, self.end + 1, self.mask + 1)

    def encode(self, text: str) -> list[int]:
        with self._encoding():
            return self._library.encode(text, add_special_tokens=False).ids

    def begun(self, text: str) -> list[int]:
        ids = self.encode(text)
        with self._encoding():
            whole = self._library.encode(text, add_special_tokens=True)
        before = whole.special_tokens_mask.index(0) if ids else 0  # what closes a text is left out: this one goes on
        return [*whole.ids[:before], *ids]

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for batch in in_batches(texts, _BATCH):
            with self._encoding():
                encodings = self._library.encode_batch_fast(batch, add_special_tokens=False)
            for encoding in encodings:
                yield np.array(encoding.ids, dtype=np.uint32)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """What cannot be encoded, as by a vocabulary of words without one for the unknown, is one clear error."""
        try:
            yield
        except Exception as error:  # a bare one, as above
            raise DataError(
                f"tokenizer {self.name} cannot encode this text ({_line(error)}); use another one"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        kept = [index for index in self._checked(ids) if index < self._own and index not in (self.end, self.mask)]
        return self._library.decode(kept, skip_special_tokens=True)

    def special(self, index: int) -> str:
        return self._library.id_to_token(index) or super().special(index)

    def known(self, *tokens: object) -> int | None:
        """The id of the first of the tokens that the vocabulary has."""
        found = (self._library.token_to_id(token) for token in tokens if isinstance(token, str))
        return next((index for index in found if index is not None), None)

    def dump(self) -> str:
        return json.dumps({"name": self.name, "end": self.end, "mask": self.mask, "tokenizer": json.loads(self._text)})


def load_tokenizer(text: str) -> Tokenizer:
    """The tokenizer that `dump` wrote."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the tokenizer of the run is not JSON: {error}") from None
    where = "the tokenizer.json of the run"
    expect(where, found, {"name": str})
    if found["name"] == Bytes.name:
        return Bytes()
    expect(where, found, {"tokenizer": dict, "end": int, "mask": int})
    return Pieces(found["name"], json.dumps(found["tokenizer"]), found["end"], found["mask"])


def bpe_size(name: str) -> int:
    """VOCAB of `bpe:VOCAB`, checked."""
    size = name.removeprefix("bpe:")
    if not (size.isascii() and size.isdecimal()):
        raise DataError(f"tokenizer {name!r}: write bpe:VOCAB with a whole number, such as bpe:4096")
    if not LEAST_BPE <= int(size) <= MOST_BPE:
        raise DataError(
            f"tokenizer {name}: VOCAB is from {LEAST_BPE} (256 bytes, {SPECIALS} specials, one merge) to {MOST_BPE}"
        )
    return int(size)


def train_bpe(name: str, texts: Iterable[str], corpus: str) -> Pieces:
    """Byte-level BPE with exactly VOCAB ids, the last two being `end` and `mask`."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    vocab = bpe_size(name)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - SPECIALS,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    most = library.get_vocab_size() + SPECIALS
    if most < vocab:
        cure = f"choose bpe:{most} or less" if most >= LEAST_BPE else "use bytes, or more text"
        raise DataError(f"tokenizer {name}: the train split of {corpus} supports {most} ids at most; {cure}")
    return Pieces(name, library.to_str())


def name_beside(checkpoint: str) -> str:
    """The name of the tokenizer of a Hugging Face model, a directory or a hub name; `bytes` of a directory without one.

    Raises ValueError for a tokenizer in files that are not read here: bytes would be wrong ids.
    """
    folder = Path(checkpoint)
    if not folder.is_dir() or (folder / FILES[0]).is_file():
        return f"hf:{checkpoint}"
    if any((folder / name).is_file() for name in SLOW):
        raise ValueError(
            f"{checkpoint} has a tokenizer but no tokenizer.json; write one there (save_pretrained of a fast tokenizer "
            "does)"
        )
    return Bytes.name


def read_folder(name: str) -> Pieces:
    """The tokenizer of `hf:DIR`: its tokenizer.json, and its own end and mask tokens where it has them."""
    folder = _folder(name)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"tokenizer {name}: no tokenizer.json in {folder}; save one with save_pretrained of a fast one")
    try:
        text = path.read_text(encoding="utf-8")
        pieces = Pieces(name, text)
        said = _said(folder)
    except Exception as error:  # the package raises a bare Exception for a file it cannot read
        raise DataError(f"tokenizer {name}: {path} cannot be read ({_line(error)})") from error
    end = pieces.known(said.get("eos_token"), *ENDS)
    mask = pieces.known(said.get("mask_token"), *MASKS)
    return Pieces(name, text, end, None if mask == end else mask)


def choose(name: str | Tokenizer) -> Callable[[Iterable[str], str], Tokenizer]:
    """How to get the tokenizer `name` from the train texts of a corpus; a wrong name is an error before any work."""
    if isinstance(name, Tokenizer):
        return lambda texts, corpus: name
    if name == Bytes.name:
        return lambda texts, corpus: Bytes()
    if name.startswith("bpe:"):
        bpe_size(name)
        return lambda texts, corpus: train_bpe(name, texts, corpus)
    if name.startswith("hf:") and name != "hf:":
        found = read_folder(name)
        return lambda texts, corpus: found
    raise DataError(f"unknown tokenizer {name!r}: choose from bytes, bpe:VOCAB, hf:DIR")


def _folder(name: str) -> Path:
    """The directory that `hf:DIR` names, or that the hub's cache has for the model of that name."""
    given = name.removeprefix("hf:")
    try:
        folder = Path(given).expanduser()
    except RuntimeError:
        raise DataError(f"tokenizer {name}: there is no such home folder; give a path without ~") from None
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # comes with tokenizers

    try:
        return Path(snapshot_download(given, allow_patterns=list(FILES)))
    except (OSError, ValueError):
        raise DataError(
            f"tokenizer {name}: {folder} is not a directory with a tokenizer.json, nor a model that can be reached on "
            "the hub"
        ) from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _said(folder: Path) -> Values:
    """What the files beside tokenizer.json say about special tokens, as text."""
    found: Values = {}
    for name in FILES[1:]:
        if (path := folder / name).is_file():
            for role, token in json.loads(path.read_text(encoding="utf-8")).items():
                found[role] = token.get("content") if isinstance(token, dict) else token
    return found
