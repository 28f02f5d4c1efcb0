"""by_size(labels): the rows of a comparison over several sizes, size by size.

The label of such a row ends in its size, as `delta:blocks=4 | 8x64`. Before it stands the name, and rows of one name
are one design in one layout: in every picture they look alike, and a picture shows one size beside the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_SIZED = re.compile(r"(?P<name>.*) \| (?P<size>\d+x\d+)")
Key = TypeVar("Key")


def by_size(labels: Mapping[Key, str]) -> dict[str, dict[Key, str]]:
    """size -> key -> name, the shallowest first; one part with whole labels, called "", where there is one size."""
    parts: dict[str, dict[Key, str]] = {}
    for key, label in labels.items():
        if (found := _SIZED.fullmatch(label)) is None:
            return {"": dict(labels)}
        parts.setdefault(found["size"], {})[key] = found["name"]
    sizes = sorted(parts, key=lambda size: [int(number) for number in size.split("x")])
    return {size: parts[size] for size in sizes} if len(parts) > 1 else {"": dict(labels)}
