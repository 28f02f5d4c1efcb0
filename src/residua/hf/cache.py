"""What a converted model keeps between tokens beside keys and values: one more layer at the end of the HF cache.

A design that mixes tokens has a `past`; an inserted sublayer has a window or a tail. Both live in a `Memory`, which
the cache treats as a layer of its own, so that reordering for beams, repeating, selecting and resetting reach it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin

from residua.hf.anatomy import Argument
from residua.stream import Past


class Recent:
    """Tensors whose second axis is the newest tokens, `length` of them at most: a window, or a convolution's tail."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.held: tuple[Tensor, ...] = ()

    def extended(self, *new: Tensor) -> tuple[Tensor, ...]:
        """What is held and the new tokens behind it; the last `length` of them are held from now on."""
        joined = tuple(torch.cat(pair, 1) for pair in zip(self.held, new, strict=True)) if self.held else new
        self.held = tuple(each[:, -self.length :] for each in joined)
        return joined


class Kept:
    """What one batch of sequences keeps: the design's `past`, and what every inserted sublayer holds."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens seen, padding included."""
        self.seen: Tensor | int = 0
        """Tokens seen of every row, without padding."""
        self.past: Past = None
        self.slots: dict[str, Recent] = {}

    def slot(self, site: str, make: Callable[[], Recent]) -> Recent:
        """What one sublayer holds, made when it is first asked for."""
        if site not in self.slots:
            self.slots[site] = make()
        return self.slots[site]

    def advance(self, past: Past, tokens: int, mask: Tensor | None) -> None:
        """Take in a forward of `tokens` tokens, of which `mask` says which are no padding."""
        self.past = past
        self.length += tokens
        self.seen = self.seen + (tokens if mask is None else mask.long().sum(1))

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
            recent.held = tuple(map(chosen, recent.held))
        self.past, self.seen = pytree.tree_map_only(Tensor, chosen, (self.past, self.seen))


class Memory(CacheLayerMixin):
    """`Kept` in the clothes of an HF cache layer; it holds no keys and values."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, like: CacheLayerMixin) -> None:
        super().__init__()
        self.kept = Kept()
        # Masks are made for the first sliding and the first full layer, and as static ones if all layers are static:
        # this layer must not change the answer to either.
        self.is_sliding, self.is_compileable = bool(getattr(like, "is_sliding", False)), like.is_compileable

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Argument, **kwargs: Argument
    ) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the memory of a residual stream takes no keys and values: this model has fewer layers")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kept.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.kept.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.kept = Kept()

    def offload(self) -> None:
        """A few tokens a row: not worth moving."""

    def prefetch(self) -> None:
        """Never offloaded."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "this model's residual stream keeps convolutions of earlier tokens, which cannot be rolled back; "
                "decode without an assistant model"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.kept.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.kept.select(torch.arange(self.kept.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.kept.select(torch.arange(self.kept.rows)[indices.cpu()])


def memory_of(cache: HFCache, layers: int) -> Kept:
    """The memory in a cache, put there when it is first asked for; `layers` of keys and values come before it."""
    for layer in reversed(cache.layers):
        if isinstance(layer, Memory):
            return layer.kept
    if cache.layer_class_to_replicate is not None:  # such a cache grows a layer when one writes to it: grow it now
        while len(cache.layers) < layers:
            cache.layers.append(cache.layer_class_to_replicate())
    memory = Memory(cache.layers[0])
    cache.layers.append(memory)
    return memory.kept
