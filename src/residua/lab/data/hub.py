"""`hf:NAME` or `hf:NAME:key=value,key=value`: rows of a Hugging Face dataset, streamed once and then kept.

config     the configuration, where the dataset has several
split      train
column     text: the column that holds the document
revision   main: a commit makes the corpus the same for ever
megabytes  64: as many rows from the start as hold this much text; a stream need not end

What was streamed is kept in the cache under its name and options, so that later runs see the same text and need no
network; remove it from the cache to stream again. A local dataset folder may stand in place of the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from residua.lab.common.files import Record
from residua.lab.data.files import below, by_name, decoded, key
from residua.lab.data.source import DataError, Source, Tally, refuse

OPTIONS = {"config": "", "split": "train", "column": "text", "revision": "main", "megabytes": "64"}


def take(name: str, rows: Iterable[Record], column: str, limit: int, tally: Tally) -> Iterator[bytes]:
    """The documents in a column of rows, until they hold `limit` bytes."""
    for number, row in enumerate(rows):
        if row.get(column, "") is None:  # a missing value, not a wrong column
            continue
        if not isinstance(row.get(column), str):
            fits = ", ".join(each for each, value in row.items() if isinstance(value, str)) or "none"
            raise DataError(f"{name} has no text in column {column!r}; add column=..., one of: {fits}")
        text = row[column].encode("utf-8", "surrogatepass")
        if not decoded(text):
            tally.undecodable.append(f"row {number}")
            continue
        yield text
        limit -= len(text)
        if limit <= 0:
            return


def stream(name: str, dataset: str, options: Mapping[str, str], tally: Tally) -> Iterator[bytes]:
    """The documents of the dataset, from the hub; every failure of the library becomes one line with a cure."""
    try:
        import datasets
    except ImportError as error:
        refuse(f"{name} needs the datasets package: pip install 'residua[data]', or use dir:PATH", error)
    local = Path(dataset).is_dir()
    where = {} if local else {"revision": options["revision"]}
    try:
        with _quiet("huggingface_hub"):
            found = datasets.load_dataset(
                dataset, options["config"] or None, split=options["split"], streaming=True, **where
            )
            tally.licence = found.info.license or None
            yield from take(name, found, options["column"], int(options["megabytes"]) << 20, tally)
    except DataError:
        raise
    except Exception as error:  # the library passes on whatever its HTTP client, parsers and file systems raise
        cure = "check its name and options" if local else "check its name and the network, or use dir:PATH"
        refuse(f"{name} could not be streamed ({type(error).__name__}: {str(error)[:200]}); {cure}", error)


def hub(argument: str) -> Source:
    """A dataset of the hub, or a local folder that `datasets` can load."""
    name = f"hf:{argument}"
    dataset, _, rest = argument.partition(":")
    options = dict(OPTIONS)
    for pair in rest.split(",") if rest else ():
        option, equals, value = pair.partition("=")
        if option not in OPTIONS or not (equals and value):
            raise DataError(f"corpus {name}: {pair!r} is not key=value with a key among {', '.join(OPTIONS)}")
        options[option] = value
    if not dataset or not options["megabytes"].isdecimal() or int(options["megabytes"]) < 1:
        raise DataError(f"corpus {name}: write hf:NAME or hf:NAME:megabytes=N,... with N a whole number from 1")
    salt = json.dumps([dataset, options], sort_keys=True)
    local = by_name(below(Path(dataset)), Path(dataset)) if Path(dataset).is_dir() else {}
    return Source(
        name,
        f"Hugging Face dataset {dataset}, split {options['split']}, revision {options['revision']}, "
        f"at most the first {options['megabytes']} MiB of column {options['column']}",
        f"see the card of the dataset {dataset}",
        partial(key, local, salt) if local else hashlib.sha256(salt.encode()).hexdigest,
        partial(stream, name, dataset, options),
        at_hand=bool(local),
    )


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Keep its log of retries off the terminal: the outcome is one line."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
