"""Plans that come with the package, by name: `residua compare --plan demo`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from residua.lab.checkout import checkout


def recipes_folder() -> Path:
    """Where they lie: in the repository that this package runs from, or else in the package itself."""
    root = checkout()
    return Path(str(resources.files("residua.lab.compare"))) / "recipes" if root is None else root / "recipes"


def recipe_names() -> list[str]:
    """Every plan there is."""
    return sorted(file.stem for file in recipes_folder().glob("*.toml"))


def find_plan(given: Path) -> Path:
    """The file that is meant: one that exists, or the recipe of that name."""
    shipped = recipes_folder() / f"{given.name}.toml"
    if given.exists() or len(given.parts) > 1 or given.suffix or not shipped.is_file():
        return given
    return shipped
