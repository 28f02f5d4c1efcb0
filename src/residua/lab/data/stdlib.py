"""`pydoc` and `pycode`: the text that every Python brings along, read with `ast` and never imported.

pydoc   the topics of `pydoc_data`, then every docstring of more than 40 characters, cleaned of its indentation
pycode  the source files

Tests, idlelib and lib2to3 are left out because distributions drop them, and what the build wrote
(`_sysconfigdata*`, `config-*`) because it differs by machine.
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from residua.lab.data.files import by_name, documents, key
from residua.lab.data.source import DataError, Source, Tally

LICENCE = "Python Software Foundation License Version 2 (PSF-2.0), https://docs.python.org/3/license.html"
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
SHORTEST = 40


def library_files(root: Path) -> dict[str, Path]:
    """The source files of the standard library at `root`, by name."""
    found: list[Path] = []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(place, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    if not found:
        raise DataError(f"no standard library sources in {root}; use a Python installed with them, or dir:PATH")
    return by_name(found, root)


def docstrings(text: bytes) -> Iterator[str]:
    """Every docstring of more than 40 characters in a source file, outer ones first."""
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and len(found) > SHORTEST:
                yield found


def topics(path: Path) -> Iterator[str]:
    """The help topics: the dictionary literal of `pydoc_data/topics.py`."""
    if not path.is_file():
        raise DataError(f"this Python has no {path.parent.name}/{path.name}; use another one, or the corpus pycode")
    for node in _parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["topics"]:
            yield from ast.literal_eval(node.value).values()
            return
    raise DataError(
        f"{path.parent.name}/{path.name} of this Python is not the dictionary it was; use the corpus pycode"
    )


def _parse(text: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody else's code
        return ast.parse(text)


def prose(root: Path, files: Mapping[str, Path], tally: Tally) -> Iterator[bytes]:
    """The documents of `pydoc`; a file that does not parse is tallied."""
    for text in topics(root / "pydoc_data" / "topics.py"):
        yield text.encode()
    for name, path in files.items():
        try:
            found = [text.encode() for text in docstrings(path.read_bytes())]
        except (SyntaxError, UnicodeError, ValueError):
            tally.undecodable.append(name)
            continue
        yield from found


def pydoc(_: str) -> Source:
    """The documentation of this Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = library_files(root)
    return _source("pydoc", "help topics and docstrings", files, partial(prose, root, files))


def pycode(_: str) -> Source:
    """The sources of this Python."""
    files = library_files(Path(sysconfig.get_path("stdlib")))
    return _source("pycode", "sources", files, partial(documents, files))


def _source(name: str, what: str, files: Mapping[str, Path], documents: Callable[[Tally], Iterator[bytes]]) -> Source:
    version = platform.python_version()
    origin = f"{what} of the standard library of Python {version}"
    return Source(name, origin, LICENCE, partial(key, files, f"{name} {version}"), documents, python=True)
