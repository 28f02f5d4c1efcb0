"""Whether this package runs from its repository, where tests and results lie beside it, or is installed alone."""

from __future__ import annotations

from pathlib import Path


def checkout() -> Path | None:
    """The root of the repository that this module lies in; None for an installed package."""
    here = Path(__file__).resolve()
    root = here.parents[3]
    ours = (root / "pyproject.toml").is_file() and here == root / "src" / "residua" / "lab" / here.name
    return root if ours else None
