"""`pysite`: the Python sources of packages that this project and its Hugging Face extra install, at pinned versions.

One document a file. Left out are tests, and the files that a build writes (`version.py`, `__config__.py`), so that the
text depends on the versions of the packages and on nothing else of a machine: names are those inside the packages.
"""

from __future__ import annotations

from functools import partial
from importlib import metadata
from pathlib import Path

from residua.lab.data.files import documents, key
from residua.lab.data.source import DataError, Source

PACKAGES = (
    "torch", "transformers", "numpy", "sympy", "mpmath", "networkx", "matplotlib", "accelerate", "peft",
    "huggingface-hub", "jinja2", "rich", "typer", "filelock", "fsspec", "jaxtyping", "safetensors", "tokenizers",
    "packaging",
)  # fmt: skip
LEFT_OUT = {"test", "tests", "__pycache__"}
WRITTEN_BY_BUILDS = {"version.py", "_version.py", "__config__.py"}


def pysite(_: str) -> Source:
    """The sources of the packages; an error that names one that is not there."""
    files: dict[str, Path] = {}
    licences = []
    for name in PACKAGES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise DataError(
                f"corpus pysite is made of the sources of {name}, which is not installed: pip install 'residua[hf]' "
                "with the versions of constraints.txt, or use pycode"
            ) from None
        files |= sources(package)
        licences.append(f"{name} {version(package)}: {licence(package.metadata)}")
    versions = ", ".join(entry.partition(":")[0] for entry in licences)
    return Source(
        "pysite",
        f"Python sources of {versions}",
        "; ".join(licences),
        partial(key, dict(sorted(files.items())), f"pysite {versions}"),
        partial(documents, dict(sorted(files.items()))),
    )


def sources(package: metadata.Distribution) -> dict[str, Path]:
    """The Python files of a package by their names inside it."""
    found = {}
    for file in package.files or ():
        apart = ".." in file.parts or LEFT_OUT & set(file.parts) or file.name in WRITTEN_BY_BUILDS
        if file.suffix == ".py" and not apart:
            found[file.as_posix()] = Path(str(package.locate_file(file)))
    if not found:
        raise DataError(
            f"corpus pysite: {package.metadata['Name']} is installed without a list of its Python files (an editable "
            "install has none); install its wheel, or use pycode"
        )
    return found


def version(package: metadata.Distribution) -> str:
    """The release, without what a builder put behind it: the CPU and the CUDA build of one release have one text."""
    return package.version.partition("+")[0]


def licence(known: metadata.PackageMetadata) -> str:
    """What a package says of its licence, on one line."""
    for name in ("License-Expression", "License"):
        if name in known and (said := known[name].strip()):
            return said.partition("\n")[0][:200]
    classified = [value.rpartition(" :: ")[2] for value in known.get_all("Classifier") or () if "License ::" in value]
    return ", ".join(classified) or "see the package"
