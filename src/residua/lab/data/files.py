"""`dir:PATH` and `file:GLOB`: one document a file, read as UTF-8, in the order of the names."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from residua.lab.common.files import file_digest
from residua.lab.data.source import DataError, Source, Tally

LICENCE = "not stated: the text is the user's own files"


def key(files: Mapping[str, Path], salt: str) -> str:
    """A hash of the files' names and bytes: cheap beside what it saves, and never wrong, as time stamps can be."""
    digest = hashlib.sha256(salt.encode())
    for name, path in files.items():
        digest.update(repr((name, file_digest(path))).encode())
    return digest.hexdigest()


def decoded(data: bytes) -> bool:
    """Whether these bytes are text: UTF-8 without NUL."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def documents(files: Mapping[str, Path], tally: Tally) -> Iterator[bytes]:
    """The bytes of every file that is text; the others are tallied."""
    for name, path in files.items():
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"corpus: {path} cannot be read ({error.strerror}); move it away") from None
        if decoded(data):
            yield data
        else:
            tally.undecodable.append(name)


def by_name(paths: Iterable[Path], root: Path | None = None) -> dict[str, Path]:
    """The files under their names below `root`, sorted, so that nothing depends on the file system's own order."""
    named = {(path.relative_to(root) if root else path).as_posix(): path for path in paths}
    return dict(sorted(named.items()))


def directory(argument: str) -> Source:
    """Every file below a folder; hidden files and folders are left out."""
    folder = _home(f"dir:{argument}", argument)
    if not folder.is_dir():
        what = "a file; write file:" + argument if folder.is_file() else "no folder; give one that exists"
        raise DataError(f"corpus dir:{argument}: {argument} is {what}")
    files = by_name(below(folder), folder)
    return _source(f"dir:{argument}", f"the files below {argument}", files, f"no files below {argument}; add some")


def pattern(argument: str) -> Source:
    """Every file whose path matches a glob; `**` crosses folders."""
    matched = glob.glob(str(_home(f"file:{argument}", argument)), recursive=True)
    files = by_name(Path(match) for match in matched if os.path.isfile(match))
    absent = f"no file matches {argument}; write a pattern that does (** crosses folders)"
    return _source(f"file:{argument}", f"the files that match {argument}", files, absent)


def below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, hidden ones left out, in no order."""
    for place, inner, names in os.walk(folder, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(place, name)).is_file())


def _unreadable(error: OSError) -> None:
    """A folder whose files nobody can see would be a smaller corpus under the same name."""
    raise DataError(f"corpus: {error.filename} cannot be read ({error.strerror}); fix its permissions or move it away")


def _home(name: str, argument: str) -> Path:
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        raise DataError(f"corpus {name}: there is no such home folder; give a path without ~") from None


def _source(name: str, origin: str, files: Mapping[str, Path], absent: str) -> Source:
    if not files:
        raise DataError(f"corpus {name}: {absent}")
    return Source(name, origin, LICENCE, partial(key, files, "files"), partial(documents, files))
