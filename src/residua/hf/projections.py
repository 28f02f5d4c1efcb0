"""projections(attention): which modules inside an attention make q, k and v, by what each changes.

Their outputs are moved at one token, one module after another:

    q    changes the answer at this token alone
    v    changes it here and later, by as much as it was moved: twice the move, twice the change
    k    changes it here and later, and not in proportion

A fused projection is tried with the layouts in use: (q, k, v) once, for every head, or for every head of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from residua.hf.anatomy import Argument, Block, Config, Fused, Part, Projections
from residua.hf.lanes import LaneHooks

TOKEN = 2
"""Where outputs are moved: some tokens see it, and some do not."""
MOVE = 8.0
"""How far, in RMS of the output: enough that a softmax bends."""
STRAIGHT, BENT = 1e-3, 2e-2
"""Relative departures from proportion: below the one a change is in proportion, above the other it is not."""

Call = Callable[[], Tensor]
Role = Literal["query", "key", "value", "none", "unclear"]


def projections(
    attention: nn.Module, args: tuple[Argument, ...], kwargs: dict[str, Argument], x: Tensor, config: Config
) -> tuple[Projections | None, tuple[str, ...]]:
    """What makes q, k and v of an attention that was called with these arguments, and what else sees its input `x`."""

    def answer() -> Tensor:
        made = attention(*args, **kwargs)
        return made[0] if isinstance(made, tuple | list) else made

    seeing = _seeing(attention, answer, x)
    if not seeing or x.shape[1] <= TOKEN + 1:
        return None, ()
    plain = answer()
    roles = {name: _role(module, answer, plain) for name, module in seeing.items()}
    found = {role: [name for name, each in roles.items() if each == role] for role in ("query", "key", "value")}
    made: Projections | None = None
    if len(found["key"]) == len(found["value"]) == 1 and found["query"]:
        query = next((name for name in found["query"] if name.rpartition(".")[2].startswith("q")), found["query"][0])
        made = (query, found["key"][0], found["value"][0])
    elif not found["value"] and len(found["key"]) == 1:
        made = _fused(found["key"][0], seeing[found["key"][0]], answer, plain, config)
    if made is None:
        return None, ()
    own = {made.name} if isinstance(made, Fused) else set(made)
    beside = tuple(name for name in seeing if name not in own)
    return (made, beside) if _fed(attention, made, beside, args, kwargs, x, config, plain) else (None, ())


def _seeing(attention: nn.Module, answer: Call, x: Tensor) -> dict[str, nn.Module]:
    """The modules that are handed the attention's input, by path; those inside one of them are not listed."""
    found: dict[str, nn.Module] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Argument, ...]], None]:
        def hook(module: nn.Module, args: tuple[Argument, ...]) -> None:
            outside = [each for each in found if name.startswith(f"{each}.")]
            if args and args[0] is x and not outside:
                found[name] = module

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name)) for name, module in attention.named_modules() if name
    ]  # fmt: skip
    try:
        answer()
    finally:
        for handle in handles:
            handle.remove()
    return {name: module for name, module in found.items() if any(each.ndim > 1 for each in module.parameters())}


@contextmanager
def _moved(module: nn.Module, by: float, chosen: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    """Inside, the output of a module is moved at one token, in all channels or in chosen ones."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape[-1], generator=generator).to(output)
        if chosen is not None:
            noise = chosen(noise)
        output = output.clone()
        output[:, TOKEN] += by * MOVE * output.square().mean().sqrt() * noise
        return output

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _role(
    module: nn.Module, answer: Call, plain: Tensor, chosen: Callable[[Tensor], Tensor] | None = None
) -> Role:
    """What the output of a module is to attention."""
    try:
        with _moved(module, 1.0, chosen):
            once = answer() - plain
        with _moved(module, 2.0, chosen):
            twice = answer() - plain
    except (RuntimeError, AttributeError, TypeError, IndexError):  # an output of another shape
        return "unclear"
    last = plain.shape[0] - 1  # the row without padding
    changed = [bool(once[last, token].any()) for token in range(plain.shape[1])]
    if any(changed[:TOKEN]) or not any(changed):
        return "unclear" if any(changed) else "none"
    if not any(changed[TOKEN + 1 :]):
        return "query"
    later = slice(TOKEN + 1, None)
    departure = (twice - 2 * once)[last, later].norm() / (2 * once)[last, later].norm()
    return "value" if departure < STRAIGHT else "key" if departure > BENT else "unclear"


def _fused(name: str, module: nn.Module, answer: Call, plain: Tensor, config: Config) -> Fused | None:
    """The layout of a projection that makes all three, if it is one of those in use."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    made: list[int] = []
    handle = module.register_forward_hook(lambda module, args, output: made.append(output.shape[-1]))
    answer()
    handle.remove()
    for shared in dict.fromkeys((getattr(config, "num_key_value_heads", None) or heads, heads, 1)):
        width, rest = divmod(made[0], heads + 2 * shared)
        if rest or heads % shared:
            continue
        for groups in dict.fromkeys((1, shared)):
            sizes = (heads // groups * width, shared // groups * width, shared // groups * width)
            layout = Fused(name, sizes, groups)
            if all(
                _role(module, answer, plain, _third(layout, lane)) == role
                for lane, role in enumerate(("query", "key", "value"))
            ):
                return layout
    return None


def _third(layout: Fused, lane: int) -> Callable[[Tensor], Tensor]:
    """Leaves of a vector of channels those that make q, k or v."""

    def chosen(noise: Tensor) -> Tensor:
        assert isinstance(layout.sizes, tuple)
        assert isinstance(layout.groups, int)
        mask = torch.zeros(layout.groups, sum(layout.sizes))
        before = sum(layout.sizes[:lane])
        mask[:, before : before + layout.sizes[lane]] = 1
        return noise * mask.flatten().to(noise)

    return chosen


def _fed(
    attention: nn.Module, made: Projections, beside: tuple[str, ...], args: tuple[Argument, ...],
    kwargs: dict[str, Argument], x: Tensor, config: Config, plain: Tensor,
) -> bool:  # fmt: skip
    """Whether the attention answers the same when it is fed three lanes that are all its input."""
    block = Block((Part("attn", ""),), made, beside)
    lanes = torch.cat([x, x, x], -1)
    hooks = LaneHooks(attention, block, config)
    try:
        again = attention(
            *(lanes if each is x else each for each in args),
            **{key: lanes if each is x else each for key, each in kwargs.items()},
        )
    except (RuntimeError, ValueError, IndexError):  # something inside takes the input as wide as it was
        return False
    finally:
        hooks.detach()
    again = again[0] if isinstance(again, tuple | list) else again
    return bool(torch.allclose(again, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max())))
