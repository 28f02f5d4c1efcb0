"""shade(value): the colour of a weight, on scales that readers with any colour vision can follow.

Viridis for weights, purple to orange for signed ones and for differences; both on square roots, so that the many small
weights show beside the few large ones. The page's script is given the same stops and does the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SEQUENTIAL = (
    "#440154", "#48186a", "#472d7b", "#424086", "#3b528b", "#33638d", "#2c728e", "#26828e", "#21918c", "#1fa088",
    "#28ae80", "#3fbc73", "#5ec962", "#84d44b", "#addc30", "#d8e219", "#fde725",
)  # fmt: skip
DIVERGING = (
    "#2d004b", "#532687", "#8073ac", "#b1aad1", "#d8daeb", "#f7f7f6", "#fee0b6", "#fcb761", "#e08214", "#b25706",
    "#7f3b08",
)  # fmt: skip


def shade(value: float, largest: float, *, signed: bool) -> tuple[int, int, int]:
    """Red, green and blue of a value between 0 (or -largest) and largest."""
    root = math.copysign(math.sqrt(min(1.0, abs(value) / largest)), value) if largest else 0.0
    return _between(DIVERGING if signed else SEQUENTIAL, (root + 1) / 2 if signed else max(0.0, root))


def is_dark(colour: tuple[int, int, int]) -> bool:
    """Whether white can be read on it better than black: then either has a contrast of at least 4.5 to 1."""
    return contrast(colour, (255, 255, 255)) > contrast(colour, (0, 0, 0))


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """The ratio of their luminances, from 1 to 21, as WCAG 2 defines it."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: tuple[int, int, int]) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def as_hex(colour: tuple[int, int, int]) -> str:
    """#rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _between(stops: Sequence[str], share: float) -> tuple[int, int, int]:
    place = share * (len(stops) - 1)
    before = min(int(place), len(stops) - 2)
    left, right = (bytes.fromhex(stops[each][1:]) for each in (before, before + 1))
    red, green, blue = (round(a + (b - a) * (place - before)) for a, b in zip(left, right, strict=True))
    return red, green, blue
