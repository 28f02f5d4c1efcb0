"""data_key(corpus, tokenizer): a hash of all that decides the ids, from the sources alone, without making them.

Equal keys give equal fingerprints. The key of files holds their names, so that equal text may have several keys.
"""

from __future__ import annotations

import platform
from importlib import metadata

from residua.lab.common.files import json_digest
from residua.lab.data.corpus import FORMAT
from residua.lab.data.source import source
from residua.lab.data.tokenizer import choose, read_folder


def data_key(corpus: str, tokenizer: str) -> str | None:
    """The key; None where the sources are not at hand, as those of a stream."""
    where = source(corpus)
    if not where.at_hand:
        return None
    choose(tokenizer)  # a wrong name says so
    own = read_folder(tokenizer).hash if tokenizer.startswith("hf:") else tokenizer
    versions = [platform.python_version() if where.python else "", metadata.version("tokenizers")]
    return json_digest([where.key(), own, FORMAT, versions])
