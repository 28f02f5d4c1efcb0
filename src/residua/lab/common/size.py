"""read_size("6x128x4") = {"depth": 6, "width": 128, "heads": 4}: a size as every command takes it, heads or none."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?")
FORM = "DEPTHxWIDTH or DEPTHxWIDTHxHEADS, such as 6x128 or 6x128x4"


def read_size(text: str) -> dict[str, int] | None:
    """The numbers of a size; None where the text is not of its form."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    return {name: int(part) for name, part in zip(("depth", "width", "heads"), found.groups(), strict=True) if part}
