"""The table of `residua designs` as it ships: read in milliseconds, where counting 22 designs takes seconds and torch.

`table.json` beside this file holds the rows for `COUNTED` and a hash of the sources that decide them. Where those have
changed since, there is no shipped table, and the command counts. `tools/update_readme` writes it.
"""

from __future__ import annotations

from pathlib import Path

from residua.lab.common.files import Values, read_json, tree_digest

FILE = Path(__file__).with_name("table.json")
COUNTED = (768, 12, "attn,mlp")
"""Width, depth and layout of the shipped counts: the command's defaults."""
DECIDING = ("streams/*.py", "plan.py", "stream.py", "options.py", "registry.py", "spec.py")
"""The sources whose change may change a row."""


def source_digest() -> str:
    """A hash of the sources that decide the rows."""
    return tree_digest(Path(__file__).parent.parent, *DECIDING)


def shipped(width: int, depth: int, layout: str) -> list[Values] | None:
    """The rows for these counts; None where none are shipped, or the sources are not those they were made from."""
    if (width, depth, layout) != COUNTED or not FILE.is_file():
        return None
    found = read_json(FILE)
    return found["rows"] if found["sources"] == source_digest() else None
