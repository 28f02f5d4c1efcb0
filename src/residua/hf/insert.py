"""Sublayers that a conversion inserts, ShortSWA, ShortConv and Canon, which start as nothing:

    swa     y = O softmax(q k' / sqrt(e)) v over the last `window` tokens, O = 0 at the start
    canon   y_t = sum_s taps_s x_{t-s}, taps = 0 at the start;     conv   y = silu of the same

The model is still the base, and they learn from there. They are those of `residua.model`, with the caches and the left
padding of Hugging Face: what they keep between tokens lies in the memory of `hf/cache.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from residua import ops
from residua.hf.anatomy import KEPT, Config
from residua.hf.cache import Kept, Recent
from residua.plan import Kinds, Site, Slot
from residua.stream import Stream

ROPE_BASE = 10_000.0
EPS = 1e-6


KINDS = Kinds()
"""What can be inserted."""


class Inserted(nn.Module, ABC):
    """norm of every lane, then y = forward(*lanes, ...); keyword-only arguments are its options in a layout."""

    def __init_subclass__(cls, *, kind: str | None = None) -> None:
        super().__init_subclass__()
        KINDS.add(kind, cls)

    def __init__(self, config: Config, site: Site) -> None:
        super().__init__()
        self.site = site.name
        self.gain = nn.Parameter(torch.ones(config.hidden_size))

    def norm(self, x: Tensor) -> Tensor:
        """x / rms(x) * gain."""
        return F.rms_norm(x, x.shape[-1:], self.gain, EPS)

    @abstractmethod
    def forward(
        self, *lanes: Tensor, mask: Tensor | None, kept: Kept | None, documents: Tensor | None = None
    ) -> Tensor:
        """What is written: `mask` is False at padding, `documents` counts those of a packed row from the one that goes
        on, and `kept` is what earlier tokens left."""

    @abstractmethod
    def writer(self) -> Tensor:
        """The parameter that makes its output, which starts at zero."""

    @torch.no_grad()
    def start(self, std: float) -> None:
        """Every parameter at its start, but for those that a checkpoint has filled."""
        init.ones_(self.gain)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init.normal_(module.weight, std=std)
        init.zeros_(self.writer())


class InsertedSWA(Inserted, kind="swa"):
    """Attention over the last `window` tokens, or with mode=local over those so far of the current block of them."""

    def __init__(
        self, config: Config, site: Site, *, window: int = 16, mode: Literal["sliding", "local"] = "sliding"
    ) -> None:
        super().__init__(config, site)
        if window < 1:
            raise ValueError(f"{site.name}: window={window} must be at least 1: it counts the current token")
        self.window, self.mode, self.heads = window, mode, config.num_attention_heads
        width, head_width = config.hidden_size, config.hidden_size // config.num_attention_heads
        shared = (getattr(config, "num_key_value_heads", None) or self.heads) * head_width
        self.q = nn.Linear(width, self.heads * head_width, bias=False)
        self.k, self.v = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.o = nn.Linear(self.heads * head_width, width, bias=False)

    def forward(
        self, *lanes: Tensor, mask: Tensor | None, kept: Kept | None, documents: Tensor | None = None
    ) -> Tensor:
        x, key, value = lanes if len(lanes) == 3 else lanes * 3
        real = torch.ones(x.shape[:2], dtype=torch.long, device=x.device) if mask is None else mask.long()
        seen = 0 if kept is None else kept.seen
        before = seen[:, None] if isinstance(seen, Tensor) else seen
        queries = torch.where(real > 0, before + real.cumsum(1) - 1, -1)  # the place among the row's own tokens
        if documents is not None:
            queries = spread(queries, documents, self.window)
        k, v, keys = self.k(key), self.v(value), queries
        if kept is not None:
            recent = kept.slot(self.site, self.window, (0, 0, -1))
            k, v, keys = recent.extended(k, v, keys, whole=kept.recording and documents is None)
            if documents is not None:
                self._close(recent, keys, queries, documents)
        y = ops.window_attend(
            self.q(x), k, v, window=self.window, mode=self.mode, axis=1, heads=self.heads,
            queries=queries, keys=keys, rotary=ROPE_BASE,
        )  # fmt: skip
        return self.o(y)

    def _close(self, recent: Recent, keys: Tensor, queries: Tensor, documents: Tensor) -> None:
        """Of what is held, leave the last document alone, its places counted from its first token."""
        last = documents[:, -1:]
        first = queries.gather(1, (documents < last).sum(1, keepdim=True))
        before = keys.shape[1] - queries.shape[1]
        own = torch.cat([(last == 0).expand(-1, before), documents == last], 1) & (keys >= 0)
        places = torch.where(own, keys - torch.where(last == 0, 0, first), -1)
        *others, held = recent.held
        recent.hold((*others, places[:, places.shape[1] - held.shape[1] :]))

    def writer(self) -> Tensor:
        return self.o.weight


class InsertedCanon(Inserted, kind="canon"):
    """A linear causal convolution per channel."""

    def __init__(self, config: Config, site: Site, *, kernel: int = 4) -> None:
        super().__init__(config, site)
        if kernel < 1:
            raise ValueError(f"{site.name}: kernel={kernel} must be at least 1: it counts the current token")
        self.taps = nn.Parameter(torch.zeros(kernel, config.hidden_size))

    def forward(
        self, *lanes: Tensor, mask: Tensor | None, kept: Kept | None, documents: Tensor | None = None
    ) -> Tensor:
        (x,) = lanes
        if mask is not None:
            x = x * mask[..., None].to(x.dtype)  # padding must not leak into the tokens after it
        back = len(self.taps) - 1
        recent = (Kept() if kept is None else kept).slot(self.site, back, (0,), filled=True)
        (history,) = recent.extended(x, whole=kept is not None and kept.recording and documents is None)
        taps = self.taps.to(x.dtype)
        if documents is None:
            return self.activate(ops.shortconv(x, history[:, :back], taps))
        at = F.pad(documents, (back, 0))  # what came before belongs to the document that goes on
        total = taps[0] * x
        for distance in range(1, back + 1):
            there = slice(back - distance, back - distance + x.shape[1])
            total = total + taps[distance] * history[:, there] * (at[:, there] == documents)[..., None].to(x.dtype)
        (held,) = recent.held
        own = (at == documents[:, -1:])[:, at.shape[1] - held.shape[1] :]
        recent.hold((held * own[..., None].to(x.dtype),))
        return self.activate(total)

    def activate(self, y: Tensor) -> Tensor:
        """Canon is linear."""
        return y

    def writer(self) -> Tensor:
        return self.taps


class InsertedConv(InsertedCanon, kind="conv"):
    """The same, through silu."""

    def activate(self, y: Tensor) -> Tensor:
        return F.silu(y)


def start_std(config: Config) -> float:
    """Of the matrices of a model, by either of the names that configurations have for it."""
    found: float | None = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return 0.02 if found is None else found


def spread(places: Tensor, documents: Tensor, window: int) -> Tensor:
    """Places in a row as places in which no window of `window` tokens reaches from one document into another.

    Each document but the one that goes on begins at a multiple of the window, as blocks of mode=local do, and `window`
    or more behind the end of the one before.
    """
    columns = torch.arange(places.shape[1], device=places.device)
    begins = F.pad(documents.diff(dim=1), (1, 0)) != 0
    first = places.gather(1, torch.where(begins, columns, 0).cummax(1).values)
    start = -(-(first + 2 * window * documents) // window) * window
    return torch.where(documents > 0, start + places - first, places)


def insert(config: Config, slots: tuple[Slot, ...], sites: tuple[Site, ...], stream: Stream) -> nn.ModuleDict:
    """The sublayers that one layer has beside its own, by the names of their sites."""
    made = nn.ModuleDict()
    for site, slot in zip(sites, slots, strict=True):
        if site.kind in KEPT:
            continue
        if stream.reads_direction and stream.starts != "standard":
            raise ValueError(
                f"{stream.spec} writes along the direction of a sublayer's output, and {site.name} starts at zero, "
                "which has none; use start=standard"
            )
        sublayer = KINDS.of(slot)(config, site, **slot.options)
        sublayer.start(start_std(config))
        made[site.name] = sublayer
    return made
