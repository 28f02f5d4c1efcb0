"""Which document a token belongs to and where it stands in it, followed from one forward to the next.

A document is a run of equal ids: it ends where the next token has another one. Positions count from its first token.
An id below zero is padding, which belongs to none and ends none, but takes up a position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Places(NamedTuple):
    """Of every row and column of a batch; padding carries on what stood before it."""

    ids: Int[Tensor, "b t"]
    """Of the last token so far; -1 before the first."""
    documents: Int[Tensor, "b t"]
    """0, 1, 2, ... in the order of the row; -1 before the first token."""
    positions: Int[Tensor, "b t"]
    """In the document."""

    def last(self, columns: int) -> Places:
        """The newest columns."""
        return Places(*(x[:, max(0, x.shape[1] - columns) :] for x in self))

    def then(self, after: Places) -> Places:
        """These columns and those that follow."""
        return Places(*(torch.cat(pair, 1) for pair in zip(self, after, strict=True)))


def plain(rows: int, length: int, device: torch.device) -> Places:
    """The newest column of `length` tokens in one document called 0; `length` 0 is a row that has not begun."""
    began = 0 if length else -1
    return Places(*(torch.full((rows, 1), value, device=device) for value in (began, began, length - 1)))


def follow(before: Places, ids: Int[Tensor, "b t"]) -> Places:
    """The places of the next columns, from the newest one before them."""
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    newest = torch.where(ids >= 0, columns, -1).cummax(1).values
    filled = torch.where(newest < 0, before.ids, ids.gather(1, newest.clamp_min(0)))
    begins = (ids >= 0) & (ids != torch.cat([before.ids, filled[:, :-1]], 1))
    first = torch.where(begins, columns, -1 - before.positions).cummax(1).values
    return Places(filled, before.documents + begins.cumsum(1), columns - first)


def given(
    shape: torch.Size, mask: Bool[Tensor, "b t"] | None, documents: Int[Tensor, "b t"] | None, before: Places
) -> Int[Tensor, "b t"]:
    """The id of every column, -1 for padding: what the caller says, or else the document that is open."""
    ids = before.ids.clamp_min(0).expand(shape) if documents is None else documents
    return ids if mask is None else torch.where(mask, ids, -1)
