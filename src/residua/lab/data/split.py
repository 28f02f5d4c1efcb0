"""Train or validation: near-duplicates on one side, groups in the order of their hash, validation filled to 5 %.

The hash of a group is the least SHA-256 of its documents. Groups are taken for validation in that order until 5 % of
the bytes are reached, as nearly as whole groups allow: a threshold on the hash would leave many a small corpus without
validation, and looking for groups that fill the last gap would fill it with small ones. A group above 5 % stays in
training; if all are, the smallest one is the validation side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

VALID_SHARE = 0.05


def validation(
    digests: Sequence[bytes], sizes: Sequence[int], group: Int[np.ndarray, "documents"]
) -> Bool[np.ndarray, "documents"]:
    """Which documents are for validation; none if there is but one group."""
    least: dict[int, bytes] = {}
    size: dict[int, int] = {}
    for index, name in enumerate(group.tolist()):
        least[name] = min(least.get(name, digests[index]), digests[index])
        size[name] = size.get(name, 0) + sizes[index]
    target = VALID_SHARE * sum(sizes)
    chosen: set[int] = set()
    taken = 0
    for name in sorted(least, key=least.__getitem__):
        if size[name] <= target:
            if abs(taken + size[name] - target) >= abs(taken - target):
                break
            chosen.add(name)
            taken += size[name]
    if not chosen and len(least) > 1:
        chosen.add(min(least, key=lambda name: (size[name], least[name])))
    return np.isin(group, sorted(chosen))
