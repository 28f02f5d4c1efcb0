"""Would the verdict come out again? The differences of all seeds beside those of two disjoint halves of them.

    whole: better, worse or not told apart        halves: seeds 0, 2, 4, ... and 1, 3, 5, ...

A difference that was told apart is kept if the mean of either half lies on its side of zero. One that was not is kept
unless a half by itself would be told apart. Whatever is not kept is undecided: another draw of seeds may say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from residua.lab.common.stats import paired


def halves(gaps: Sequence[float]) -> tuple[list[float], list[float]]:
    """The differences of every other seed, and of the rest."""
    return list(gaps[::2]), list(gaps[1::2])


def kept(gaps: Sequence[float], significant: bool | None) -> bool:
    """Whether both halves of the seeds bear out what all of them say.

    gaps:        a row less its baseline, seed by seed.
    significant: the verdict over all of them; None, of too few seeds for one, is never borne out.
    """
    if significant is None:
        return False
    parts = halves(gaps)
    if significant:
        whole = fmean(gaps)
        return all(part and fmean(part) * whole > 0 for part in parts)
    return not any(paired(part, [0.0] * len(part)).significant for part in parts if part)
