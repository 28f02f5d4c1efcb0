"""Where text comes from: a `Source` knows its documents, its licence and a hash of what it would read.

A corpus is written `pydoc`, `pycode`, `pysite`, `dir:PATH`, `file:GLOB` or `hf:NAME`.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

Text = TypeVar("Text", str, bytes)

FORMS = {
    "pydoc": ("pydoc", "residua.lab.data.stdlib:pydoc"),
    "pycode": ("pycode", "residua.lab.data.stdlib:pycode"),
    "pysite": ("pysite", "residua.lab.data.pysite:pysite"),
    "dir": ("dir:PATH", "residua.lab.data.files:directory"),
    "file": ("file:GLOB", "residua.lab.data.files:pattern"),
    "hf": ("hf:NAME", "residua.lab.data.hub:hub"),
}
"""How each kind of corpus is written, and the function that makes it from its argument."""


class DataError(ValueError):
    """A corpus or a tokenizer that cannot be had; the message is one line and says what to do."""


@dataclass
class Tally:
    """What happened while the documents were read."""

    undecodable: list[str] = field(default_factory=list)
    """Names of files or rows that are not UTF-8 text."""
    licence: str | None = None
    """Set by a source that learns its licence only by reading."""


@dataclass(frozen=True)
class Source:
    """One corpus before it is read."""

    name: str
    """As the user wrote it."""
    origin: str
    licence: str
    key: Callable[[], str]
    """A hash of everything that decides the documents: it names the cached corpus."""
    documents: Callable[[Tally], Iterator[bytes]]
    """Every document as UTF-8, in an order that depends on nothing but the content and the names of the files."""
    python: bool = False
    """The text is part of the Python that reads it, so that its version belongs to the fingerprint."""
    at_hand: bool = True
    """`key` is a hash of the text itself, and not of a name that other text may have tomorrow."""


def source(name: str) -> Source:
    """The source a corpus name stands for; a wrong one is an error before anything is read."""
    kind, colon, argument = name.partition(":")
    if kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f"did you mean {FORMS[near[0]][0]}? " if near else ""
        raise DataError(f"unknown corpus {name!r}: {hint}choose from {', '.join(form for form, _ in FORMS.values())}")
    form, made_by = FORMS[kind]
    if bool(argument) != (":" in form) or bool(colon) != (":" in form):
        raise DataError(f"corpus {name!r}: write it as {form}")
    return pkgutil.resolve_name(made_by)(argument)


def refuse(message: str, cause: BaseException | None = None) -> NoReturn:
    """Raise `DataError` with its message on one line."""
    raise DataError(" ".join(message.split())) from cause


def in_batches(texts: Iterable[Text], size: int) -> Iterator[list[Text]]:
    """The texts in order, in lists that end with the first text that makes them longer than `size`."""
    batch: list[Text] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held > size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
