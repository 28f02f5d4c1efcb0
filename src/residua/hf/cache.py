"""What a converted model keeps between tokens beside keys and values: it rides on the first layer of the HF cache.

A design that mixes tokens has a `past`; an inserted sublayer has a window or a tail. Both live in a `Kept`, which the
first layer of the cache carries: its class is swapped for a subclass, so that the cache has as many layers as the
model, and reordering for beams, repeating, selecting, cropping and resetting reach what is kept.
"""

from __future__ import annotations

from abc import ABC
from functools import cache as once

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache as HFCache

from residua.hf.anatomy import Argument, Class
from residua.hf.made import made
from residua.stream import Past


class Recent:
    """Tensors whose second axis is the newest tokens, `length` of them at most: a window, or a convolution's tail."""

    def __init__(self, length: int, empty: tuple[int, ...], filled: bool, static: bool) -> None:
        """empty: what stands in each tensor where there was no token. filled: hold `length` from the first on."""
        self.length, self.empty, self.filled, self.static = length, empty, filled or static, static
        self.held: tuple[Tensor, ...] = ()

    def extended(self, *new: Tensor, whole: bool = False) -> tuple[Tensor, ...]:
        """The last `length` tokens and the new ones behind them; the last `length` of all are held from now on.

        whole: all are held, until `crop` says how many of them stay.
        """
        held = self.held or (self._blank(new) if self.filled else ())
        joined = tuple(torch.cat(pair, 1) for pair in zip(held, new, strict=True)) if held else new
        self.hold(joined if whole else newest(joined, self.length))
        return newest(joined, self.length + new[0].shape[1])

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Keep these; in the place of those that are there, where addresses must stay."""
        self.held = kept_in(self.held, tensors) if self.static else tensors

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens, and then all but `length`."""
        self.held = newest(tuple(each[:, : each.shape[1] - tokens] for each in self.held), self.length)

    def _blank(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            each.new_full((len(each), self.length, *each.shape[2:]), value)
            for each, value in zip(new, self.empty, strict=True)
        )


def newest(tensors: tuple[Tensor, ...], length: int) -> tuple[Tensor, ...]:
    """The last tokens of each."""
    return tuple(each[:, max(0, each.shape[1] - length) :] for each in tensors)


def kept_in(old: Past, new: Past) -> Past:
    """The new tensors in the memory of the old ones, as a compiled step needs it; fresh ones at the first time."""
    before, after = pytree.tree_leaves(old), pytree.tree_leaves(new)
    if [each.shape for each in before] == [each.shape for each in after]:
        for one, other in zip(before, after, strict=True):
            one.copy_(other)
        return old
    fresh = pytree.tree_map(Tensor.clone, new)
    if not torch.compiler.is_compiling():
        for each in pytree.tree_leaves(fresh):
            torch._dynamo.mark_static_address(each)
    return fresh


class Kept:
    """What one batch of sequences keeps: the design's `past`, and what every inserted sublayer holds."""

    def __init__(self, static: bool = False) -> None:
        self.static = static
        """Whether tensors stay where they are, as in a static cache, so that a step can be compiled."""
        self.recording = False
        """Whether tokens may be taken back: nothing is dropped before `crop`."""
        self.seen: Tensor | int = 0
        """Tokens seen of every row, in its last document, without padding."""
        self.past: Past = None
        self.slots: dict[str, Recent] = {}

    def slot(self, site: str, length: int, empty: tuple[int, ...], *, filled: bool = False) -> Recent:
        """What one sublayer holds, made when it is first asked for."""
        if site not in self.slots:
            self.slots[site] = Recent(length, empty, filled, self.static)
        return self.slots[site]

    def opening(self) -> Past:
        """The `past` for one forward; a copy where its memory is written again, before the head has read it."""
        return pytree.tree_map_only(Tensor, Tensor.clone, self.past) if self.static else self.past

    def advance(self, past: Past, mask: Tensor | None, documents: Tensor | None, like: Tensor) -> None:
        """Take in a forward of tokens `like` [b t], of which `mask` says which are no padding."""
        self.past = kept_in(self.past or (), past) if self.static and past is not None else past
        new: Tensor | int = like.shape[1] if mask is None else mask.long().sum(1)
        seen = self.seen + new
        if documents is not None:
            last = documents[:, -1:]
            seen = (documents == last).sum(1) + (last[:, 0] == 0) * self.seen
        if self.static:
            before = self.seen if isinstance(self.seen, Tensor) else ()
            seen = kept_in(before, seen if isinstance(seen, Tensor) else like.new_full((len(like),), seen))
        self.seen = seen

    @property
    def rows(self) -> int:
        """Sequences in the batch; 0 before anything was kept."""
        held = [each for recent in self.slots.values() for each in recent.held]
        return next((len(leaf) for leaf in (*held, *pytree.tree_leaves(self.past)) if leaf is not None), 0)

    def select(self, rows: Tensor) -> None:
        """Keep or repeat these rows."""

        def chosen(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, rows.to(leaf.device))

        for recent in self.slots.values():
            recent.hold(tuple(map(chosen, recent.held)))
        self.past, self.seen = pytree.tree_map_only(Tensor, chosen, (self.past, self.seen))

    def crop(self, tokens: int) -> None:
        """Take back the newest tokens."""
        if tokens and self.past is not None:
            raise ValueError(
                "this model's residual stream keeps convolutions of earlier tokens, which cannot be rolled back; "
                "decode without an assistant model"
            )
        if tokens and self.slots and not self.recording:
            raise ValueError(
                "what an inserted sublayer has dropped cannot be rolled back; call activate_past_recording() of the "
                "cache before the forward whose tokens are taken back"
            )
        for recent in self.slots.values():
            recent.crop(tokens)
        self.seen = self.seen - tokens


class Carrying(ABC):  # as layers of caches are: a class may take another's place on a live object if both begin alike
    """Mixed into the class of a cache's first layer, before it: its keys and values, and beside them a `Kept`."""

    kept: Kept
    record_past = False

    def __reduce_ex__(self, protocol: Argument) -> tuple[Argument, ...]:
        return (_blank, (type(self).__bases__[1],), *super().__reduce_ex__(protocol)[2:])

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.kept = Kept(self.kept.static)

    def crop(self, tokens_to_remove: int) -> None:
        self.kept.recording = self.record_past
        self.kept.crop(abs(tokens_to_remove))
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.kept.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.kept.select(torch.arange(self.kept.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.kept.select(torch.arange(self.kept.rows)[indices.cpu()])


@once
def _carrying(base: Class) -> Class:
    """The class of a first layer that carries what is kept."""
    body = {"is_croppable": False, "_layer_type": None}  # of a layer type that is registered by name, the base stays it
    return made(f"Residua{base.__name__}", (Carrying, base), body)


def _blank(base: Class) -> Argument:
    """A first layer whose state comes after it: how one is pickled."""
    cls = _carrying(base)
    return cls.__new__(cls)


def memory_of(cache: HFCache) -> Kept:
    """What a cache keeps beside keys and values, put there when it is first asked for."""
    if not cache.layers:  # such a cache grows a layer when one writes to it: grow the first now
        cache.layers.append(cache.layer_class_to_replicate())
        beside: list[Argument] | None = getattr(cache, "linear_cache", None)
        if beside == []:  # of MiniMax: as long as the layers, and None where nothing is kept yet
            beside.append(None)
    first: Argument = cache.layers[0]
    if not isinstance(first, Carrying):
        kind: Class = type(first)
        first.__class__ = _carrying(kind)
        first.kept = Kept(first.is_compileable)
    kept: Kept = first.kept
    kept.recording = first.record_past
    return kept
