"""The residual machinery alone: every read and write of a deep stack whose sublayers do next to nothing.

A design is run through its contract with y = g o x for a sublayer and no norm, so that what is timed is the design. The
public form of the same stack keeps a list and reads it by stacking, at every site.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.lab.bench.device import current
from residua.lab.bench.forms import public_read
from residua.lab.bench.timing import Form, Measured, exponent, interleave
from residua.plan import Plan, parse_layout
from residua.registry import build
from residua.runner import walk

TYPES = (torch.float32, torch.bfloat16)


def trivial_sublayers(depth: int, width: int) -> Tensor:
    """A gain per channel and sublayer: the cheapest sublayer whose outputs are not all multiples of its input."""
    return 0.5 * torch.randn(2 * depth, width, generator=torch.Generator().manual_seed(3)).to(current())


def ours(
    design: str, depth: int, width: int, tokens: int, moved: float = 0.1, dtype: torch.dtype = torch.float32
) -> Form:
    """Forward and backward of a design's stream over `depth` blocks of two trivial sublayers, its parameters `moved`
    away from their start."""
    plan = Plan.regular(width, depth, parse_layout("attn,mlp"))
    stream = build(design, plan)
    generator = torch.Generator().manual_seed(1)
    stream.reset(generator)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(moved * torch.randn(parameter.shape, generator=generator))
    stream.to(current(), dtype)
    x, slope = _input(width, tokens, dtype)
    inputs, gains = [x, *stream.parameters()], trivial_sublayers(depth, width).to(dtype)

    def run() -> object:
        *_, head = walk(stream, x, lambda site, read: gains[site.index] * read.lanes[0])
        (out,) = head.lanes
        return torch.autograd.grad(out, inputs, slope, allow_unused=True)

    return run


def public(
    depth: int, width: int, tokens: int, block: int = 1, scale: float = 0.1, dtype: torch.dtype = torch.float32
) -> Form:
    """The same for delta attention residuals as public code writes them: a list, stacked at every read."""
    x, slope = _input(width, tokens, dtype)
    drawn = torch.randn(2 * depth, width, generator=torch.Generator().manual_seed(2))
    queries = (scale * drawn).to(current(), dtype).requires_grad_()
    gains = trivial_sublayers(depth, width).to(dtype)

    def run() -> object:
        h, change, sources = x, None, [x]
        for index in range(2 * depth):
            x_in = h + public_read(queries[index], sources) if index else h  # the first site has nothing to choose from
            y = gains[index] * x_in
            h, change = h + y, y if change is None else change + y
            if (index + 1) % block == 0:
                sources, change = [*sources, change], None
        return torch.autograd.grad(h, [x, queries], slope)

    return run


def measure(
    depths: Sequence[int], width: int, tokens: int, seconds: float, types: Sequence[torch.dtype] = TYPES
) -> Measured:
    """Every type, its name first."""
    found = {str(dtype).removeprefix("torch."): _type(dtype, depths, width, tokens, seconds) for dtype in types}
    return {"width": width, "tokens": tokens, "types": found}


def _type(
    dtype: torch.dtype, depths: Sequence[int], width: int, tokens: int, seconds: float, blocks: int = 4
) -> Measured:
    """Standard, full and block deltas, ours and public, over depth.

    The public forms take so long that a budget holds few rounds of them. So ours also run without them, in many rounds,
    whose fastest are the times that growth is found from.
    """
    rows = []
    for depth in depths:
        blocked = f"delta:blocks={blocks}"
        names = ("standard", "delta", blocked, f"attnres:blocks={blocks}", "delta:block=4")
        fast = {name: ours(name, depth, width, tokens, dtype=dtype) for name in names}
        slow = {
            "public": public(depth, width, tokens, dtype=dtype),
            f"public blocks={blocks}": public(depth, width, tokens, block=max(1, 2 * depth // blocks), dtype=dtype),
        }
        alone = interleave(fast, controlled="delta", seconds=seconds / 2)
        subjects = {name: fast[name] for name in ("delta", blocked)}
        beside = interleave(subjects | slow, controlled="delta", seconds=seconds, least=3)
        rows.append(
            {
                "depth": depth,
                "seconds": {name: alone.least(name) for name in fast} | {name: beside.least(name) for name in slow},
                "ratios": {
                    name: beside.ratio(name, other, "delta").to_json()
                    for name, other in zip(subjects, slow, strict=True)
                },
            }
        )
    return {"rows": rows, "growth": _growth(rows)}


def _growth(rows: list[Measured]) -> dict[str, float]:
    """Exponents of the time over that of `standard`: what the design adds."""
    if len(rows) < 2:
        return {}
    depths = [row["depth"] for row in rows]

    def net(name: str) -> list[float]:
        return [max(row["seconds"][name] - row["seconds"]["standard"], 1e-9) for row in rows]

    return {name: exponent(depths, net(name)) for name in rows[0]["seconds"] if name != "standard"}


def _input(width: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, 1, tokens, width, generator=generator).to(current(), dtype)
    return x.requires_grad_(), slope
