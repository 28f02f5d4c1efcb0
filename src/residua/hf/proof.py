"""same(block, layer, ...): does a layer's anatomy give what the layer gives, on a random state?

    for every site    x <- x + f(norm(x))         beside the layer's own forward, with copies of the same arguments

To the last bit; or within `ULPS` units in the last place of the largest number where the layer adds in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residua.hf.anatomy import Argument, Block, Model
from residua.hf.forward import defaults, ready
from residua.hf.program import Frame, child, first, program

STATE = "the state that the layer returns"
ULPS = 8
"""Units in the last place of the largest number of a state: what adding in another order may move."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of a comparison."""

    gap: float
    """The largest difference, in units in the last place of the largest number; infinite where one gave nothing."""
    where: str = STATE
    """The first tensor that differs."""

    @property
    def exact(self) -> bool:
        """To the last bit."""
        return self.gap == 0

    @property
    def holds(self) -> bool:
        """The same layer."""
        return self.gap <= ULPS

    def error(self, name: str, place: int, block: Block) -> str:
        """What to say where it is not the same layer: one line."""
        return (
            f"the anatomy that was found for {name} is not its layer {place}: {self.where} differs by {self.gap:.3g} "
            f"units in the last place. Found: {shown(block)}"
        )


def shown(block: Block) -> str:
    """An anatomy on one line."""
    return " | ".join(
        f"{part.kind}: {f'x = {part.norm}(raw), ' if part.norm else ''}raw + {part.line}" for part in block.parts
    )


def same(
    block: Block,
    layer: Model,
    forward: Argument,
    state: Tensor,
    keywords: dict[str, Argument],
    after: Sequence[Tensor] = (),
) -> Proof:
    """Compare a layer's own forward with its anatomy; `after` is what the layer was seen to have after each site."""
    sites: list[Tensor] = []
    own = forward(state.clone(), **copy.deepcopy(keywords))
    try:
        made = replay(block, layer, state.clone(), copy.deepcopy(keywords), sites)
    except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Proof(float("inf"), f"{STATE} could not be made ({line}) and")
    wanted = own if isinstance(own, tuple | list) else (own,)
    if wanted[0].shape != state.shape:
        return Proof(
            float("inf"), f"the shape of what the layer returns, {tuple(wanted[0].shape)} for {tuple(state.shape)},"
        )
    if isinstance(own, tuple | list) != (block.returns is not None) or len(wanted) != len(made):
        return Proof(float("inf"), "what the layer returns")
    for place, (one, other) in enumerate(zip(made, wanted, strict=True)):
        if isinstance(other, Tensor):
            gap = units(one, other)
            if gap > (ULPS if not place else 0):
                return Proof(gap, f"item {place} of what the layer returns" if place else _first(block, sites, after))
    return Proof(units(made[0], wanted[0]))


def _first(block: Block, sites: Sequence[Tensor], after: Sequence[Tensor]) -> str:
    """The first site after which the stream is not the layer's."""
    for place, (one, other) in enumerate(zip(sites, after, strict=False)):
        if units(one, other.view_as(one)) > ULPS:
            return f"the stream after site {place} ({block.parts[place].kind}, {block.parts[place].sublayer})"
    return STATE


def replay(
    block: Block, layer: Model, state: Tensor, keywords: dict[str, Argument], sites: list[Tensor] | None = None
) -> tuple[Argument, ...]:
    """What a layer returns, made from its anatomy; the stream after each site is added to `sites`."""
    frame = Frame(layer, {}, keywords, defaults(type(layer).forward))
    for part in ready(block):
        x = child(layer, part.norm)(state) if part.norm else state
        frame.values.update(x=x, lanes=x, raw=state)
        state = state + first(part.answer(frame))
        if sites is not None:
            sites.append(state)
    return (state, *(program(each)(frame) for each in block.returns or ()))


def units(one: Argument, other: Tensor) -> float:
    """The largest difference of two tensors, in units in the last place of the largest number."""
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    size = torch.maximum(one.abs().max(), other.abs().max()).to(torch.float64)
    gap = ((one - other).abs().max().to(torch.float64) / (size * torch.finfo(other.dtype).eps)).item()
    return gap if gap == gap else float("inf")
