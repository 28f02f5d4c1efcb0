"""`window_attend` in time and memory linear in the sequence: tiles of queries over overlapping views of the keys.

A tile is a run of chunks: `rows` queries each, over the `reach` keys from the first they may see to the last. The keys
of all chunks are one strided view, so nothing is copied and nothing is padded: the queries at either end, whose keys
the sequence cuts short, are tiles of their own. Saved for the backward pass are the inputs and one number a query. The
forward work on a tile is PyTorch's blocked attention for CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.native.guard import transformed
from residua.ops._backend import kernel
from residua.ops.norm import accumulator
from residua.ops.window_attend import reference

ROWS = 32
"""Queries a chunk. PyTorch's kernel blocks short queries by 32; more would widen the band of keys for nothing."""

SCORES = 2**18
"""Scores that the backward pass has in hand at a time: a megabyte, which stays in the cache."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Gives the logarithm of each row's sum beside the result, which the public function keeps to itself."""


class Tile(NamedTuple):
    """Chunk i holds `rows` queries from `start + i rows` on, and the `reach` keys from `first + i rows` on."""

    start: int
    rows: int
    first: int
    reach: int
    chunks: int = 1

    def queries(self, x: Tensor) -> Tensor:
        """[n g t e] as [n chunks (g rows) e]: the queries that share keys stand together."""
        x = x.narrow(2, self.start, self.chunks * self.rows).unflatten(2, (self.chunks, self.rows))
        return x.transpose(1, 2).flatten(2, 3)

    def keys(self, x: Tensor) -> Tensor:
        """[n t e] as a view of shape [n chunks reach e]; the chunks overlap."""
        x = x.narrow(1, self.first, (self.chunks - 1) * self.rows + self.reach)
        return x.unfold(1, self.reach, self.rows).transpose(-1, -2)

    def blocks(self, scores: int) -> Iterator[tuple[Tile, slice]]:
        """Runs of as many chunks as have `SCORES` scores together, if one has `scores`; and their place in the tile."""
        size = max(1, SCORES // scores)
        for low in range(0, self.chunks, size):
            step = low * self.rows
            count = min(size, self.chunks - low)
            yield self._replace(start=self.start + step, first=self.first + step, chunks=count), slice(low, low + count)

    def put(self, out: Tensor, y: Tensor) -> None:
        """The inverse of `queries`, into `out`."""
        place = out.narrow(2, self.start, self.chunks * self.rows).unflatten(2, (self.chunks, self.rows))
        place.copy_(y.unflatten(2, (-1, self.rows)).transpose(1, 2))

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """The inverse of `keys`: add [n chunks reach e] to `total` [n t e], in strips as wide as a chunk's step."""
        if self.chunks == 1:
            total.narrow(1, self.first, self.reach).add_(gradient[:, 0])
            return
        cover, short = self.chunks * self.rows, self.reach % self.rows
        place = total.narrow(1, self.first, cover).unflatten(1, (self.chunks, self.rows))
        place.narrow(2, 0, short).add_(gradient.narrow(2, 0, short))
        for low in range(short, self.reach, self.rows):
            strip = gradient.narrow(2, low, self.rows).flatten(1, 2)
            total.narrow(1, self.first + low, cover).add_(strip)


def tiles(tokens: int, keys: int, *, window: int, causal: bool, blocks: bool) -> tuple[Tile, ...]:
    """Cover `tokens` queries, the last of `keys` positions; `blocks`: chunks are the blocks of mode=local."""
    before = keys - tokens
    if blocks and not before:
        whole = tokens // window
        cut = whole * window
        middle = Tile(0, window, 0, window, whole)
        return tuple(tile for tile in (middle, Tile(cut, tokens - cut, cut, keys - cut)) if tile.chunks * tile.rows)
    left, right = window - 1, 0 if causal else window - 1
    head = min(tokens, max(0, left - before))
    chunks = max(0, tokens - head - right) // ROWS
    found = []
    if head:
        found.append(Tile(0, head, 0, min(keys, before + head + right)))
    if chunks:
        found.append(Tile(head, ROWS, before + head - left, left + ROWS + right, chunks))
    tail = head + chunks * ROWS
    if tail < tokens:
        first = max(0, before + tail - left)
        found.append(Tile(tail, tokens - tail, first, keys - first))
    return tuple(found)


def tile_logits(
    tile: Tile, q: Tensor, keys: Tensor | None, total: int, *, window: int, mode: str, causal: bool, bias: Tensor | None
) -> Tensor:
    """What is added to the scores, -inf where a key is not seen: [b or 1, chunks or 1, head or 1, rows, reach]."""
    before = total - q.shape[2]
    if keys is None:  # every chunk looks the same
        at = torch.arange(total, device=q.device)
        rows, reach = (at.narrow(0, *one)[None] for one in ((before + tile.start, tile.rows), (tile.first, tile.reach)))
    else:
        cover = (tile.chunks - 1) * tile.rows
        rows = keys.narrow(-1, before + tile.start, cover + tile.rows).unfold(-1, tile.rows, tile.rows)
        reach = keys.narrow(-1, tile.first, cover + tile.reach).unfold(-1, tile.reach, tile.rows)
    seen = reference.window_mask(rows, reach, window=window, mode=mode, causal=causal)  # [b? chunks rows reach]
    if bias is None:
        logits = torch.zeros((), dtype=q.dtype, device=q.device).where(seen, -torch.inf).unsqueeze(-3)
    else:
        logits = reference.biased(seen, rows, reach, bias.to(q.dtype), window=window, causal=causal)
    return logits if logits.ndim == 5 else logits[None]


def folded(logits: Tensor, batch: int, kv: int, group: int) -> Tensor:
    """The logits of a tile in the order of its scores: [n or 1, chunks or 1, (g rows), reach]."""
    if logits.shape[0] == logits.shape[2] == 1:
        return logits.expand(-1, -1, group, -1, -1).flatten(2, 3)
    chunks, rows, reach = logits.shape[1], *logits.shape[3:]
    logits = logits.expand(batch, chunks, kv * group, rows, reach).unflatten(2, (kv, group))
    return logits.transpose(1, 2).reshape(batch * kv, chunks, group * rows, reach)


def _rowwise(x: Tensor) -> Tensor:
    """With the numbers of a row side by side: PyTorch's kernel takes that for granted, and reads what lies there."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _parts(flat: list[int]) -> list[Tile]:
    return [Tile(*flat[i : i + len(Tile._fields)]) for i in range(0, len(flat), len(Tile._fields))]


# An operator of PyTorch's and no autograd.Function: torch.compile takes it as it is, and does not look inside.
@torch.library.custom_op(
    "residua::tiled_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] logits, int[] parts, bool biased) -> (Tensor, Tensor[])",
)
def tiled(
    q: Tensor, k: Tensor, v: Tensor, logits: list[Tensor], parts: list[int], biased: bool
) -> tuple[Tensor, list[Tensor]]:
    """softmax(q k' / sqrt(e) + logits) v, tile by tile, and the logarithms of the rows' sums.

    q [n g t e], k and v [n t e], the logits of every tile, the fields of all tiles in a row; `biased`: the logits are
    learned.
    """
    q, k, v, *logits = (_rowwise(one) for one in (q, k, v, *logits))
    out, sums = torch.empty_like(q), []
    for tile, added in zip(_parts(parts), logits, strict=True):
        y, one = _forward(_rowwise(tile.queries(q)), tile.keys(k), tile.keys(v), attn_mask=added)
        tile.put(out, y)
        sums.append(one)
    return out, sums


@tiled.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, logits: list[Tensor], parts: list[int], biased: bool
) -> tuple[Tensor, list[Tensor]]:
    wide = accumulator(q.dtype)
    shapes = [(len(q), tile.chunks, q.shape[1] * tile.rows) for tile in _parts(parts)]
    return torch.empty_like(q), [q.new_empty(shape, dtype=wide) for shape in shapes]


@torch.library.custom_op(
    "residua::tiled_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor[] logits, Tensor[] sums, int[] parts, bool biased) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
)
def tiled_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: list[Tensor],
    sums: list[Tensor],
    parts: list[int],
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients by q, k, v and, if `biased`, the logits."""
    wide = accumulator(q.dtype)
    to_q, to_k, to_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=wide) for x in (k, v))
    to_logits = []
    for whole, added, one in zip(_parts(parts), logits, sums, strict=True):
        by_logits = torch.zeros_like(added, dtype=wide)
        for tile, at in whole.blocks(len(q) * q.shape[1] * whole.rows * whole.reach):
            alike = added.shape[1] == 1
            here = added if alike else added[:, at]
            inputs = tile.queries(gradient), tile.queries(q), tile.keys(k), tile.keys(v), here, one[:, at]
            with torch.autocast(q.device.type, enabled=False):  # a backward pass may run inside one
                tile_q, tile_k, tile_v, change = _gradients(*(x.to(wide) for x in inputs))
            tile.put(to_q, tile_q)
            tile.add(to_k, tile_k)
            tile.add(to_v, tile_v)
            if biased:
                (by_logits if alike else by_logits[:, at]).add_(change.sum_to_size(here.shape))
        if biased:
            to_logits.append(by_logits.to(added.dtype))
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype), to_logits


@tiled_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: list[Tensor],
    sums: list[Tensor],
    parts: list[int],
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    by_logits = [torch.empty_like(x) for x in logits] if biased else []
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), by_logits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    q, k, v, logits, ctx.parts, ctx.biased = inputs
    ctx.save_for_backward(q, k, v, *logits, *output[1])


def _backward(ctx: Any, gradient: Tensor, _: list[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, *rest = ctx.saved_tensors
    logits, sums = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    *by_input, by_logits = tiled_backward(gradient, q, k, v, logits, sums, ctx.parts, ctx.biased)
    return *by_input, by_logits if ctx.biased else [None] * len(logits), None, None


tiled.register_autograd(_backward, setup_context=_save)


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, logits: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By q, k, v and the logits.

    PyTorch has a kernel for this too, a third faster, but weights that sum to one only up to rounding, and dy . y in
    place of the sum over keys of p dy . v, leave a rest where one key has all the weight and the gradient is nothing.
    Trained models have such rows: with it W_Q and W_K came out four times as far off as here.
    """
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.transpose(-1, -2)).mul_(scale).add_(logits).sub_(sums.unsqueeze(-1)).exp_()
    weights.div_(weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny))  # some rows see nothing
    change = gradient @ v.transpose(-1, -2)
    change = change.sub_((weights * change).sum(-1, keepdim=True)).mul_(weights)
    return (
        (change @ k).mul_(scale),
        (change.transpose(-1, -2) @ q).mul_(scale),
        weights.transpose(-1, -2) @ gradient,
        change,
    )


@kernel("window_attend", "chunked", "cpu")
def window_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    mode: str,
    queries: Tensor | None,
    keys: Tensor | None,
    causal: bool,
    bias: Tensor | None,
) -> Tensor:
    """The reference's result. Keys in any order (a ring, at most a window long) need no chunks and get none, and an
    exported graph, in which the number of tokens is open, cannot be cut into them."""
    given = queries is not None or torch.compiler.is_exporting()
    # PyTorch's kernel takes all of this for granted, and reads what lies behind a smaller v
    alike = v.shape == k.shape and q.shape[0] == k.shape[0] and q.dtype == k.dtype == v.dtype
    if not alike or (keys is not None and keys.shape[-1] != k.shape[2]):
        given = True
    if given or not q.shape[2] or k.shape[2] < q.shape[2] or transformed(q, k, v):
        return reference.window_attend(
            q, k, v, window=window, mode=mode, queries=queries, keys=keys, causal=causal, bias=bias
        )
    batch, kv, total, _ = k.shape
    group = q.shape[1] // kv
    if mode == "local" and keys is None and total > q.shape[2]:
        keys = torch.arange(total, device=k.device)  # blocks do not begin with the queries: no two chunks look alike
    parts = tiles(q.shape[2], total, window=window, causal=causal, blocks=mode == "local" and keys is None)
    logits = [
        folded(tile_logits(tile, q, keys, total, window=window, mode=mode, causal=causal, bias=bias), batch, kv, group)
        for tile in parts
    ]
    grouped = q.unflatten(1, (kv, group)).flatten(0, 1)
    flat = [number for tile in parts for number in tile]
    y, _ = tiled(grouped, k.flatten(0, 1), v.flatten(0, 1), logits, flat, bias is not None)
    return y.unflatten(0, (batch, kv)).flatten(1, 2)
