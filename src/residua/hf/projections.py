"""projections(attention): which modules inside an attention make q, k and v, by what each changes.

Their outputs are moved at one token, one module after another:

    q    changes the answer at this token alone
    k    changes it later, and at the first token not: that sees itself alone, whatever its key
    v    changes it here and later, in proportion: twice the move, twice the change

Where softmax has a sink the key of the first token matters too, and where a norm follows v is not in proportion: one
of the two signs is enough if the other projection shows both. A fused projection is tried with the layouts in use:
(q, k, v) once, for every head, or for every head of keys.
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
STRAIGHT = 1e-3
"""A departure from proportion, relative to the change, that is rounding."""

Call = Callable[[], Tensor]
Channels = Callable[[Tensor], Tensor] | None
"""Leaves some channels of a vector; None: all."""
Role = Literal["query", "key", "value", "either", "none"]
"""`either` is k or v: it changes the first token, and not in proportion."""


def projections(
    attention: nn.Module, args: tuple[Argument, ...], kwargs: dict[str, Argument], x: Tensor, config: Config
) -> tuple[Projections | None, tuple[str, ...]]:
    """What makes q, k and v of an attention that was called with these arguments, and what else sees its input `x`."""

    def answer() -> Tensor:
        made = attention(*args, **kwargs)
        return made[0] if isinstance(made, tuple | list) else made

    try:
        seeing = _seeing(attention, answer, x)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return (
            None,
            (),
        )  # an attention that cannot be called by itself, without a cache: designs without lanes still work
    if not seeing or x.shape[1] <= TOKEN + 1:
        return None, ()
    plain = answer()
    roles = {name: _role(module, answer, plain) for name, module in seeing.items()}
    made: Projections | None = _apart(roles)
    mixing = [name for name, role in roles.items() if role in ("key", "value", "either")]
    if made is None and len(mixing) == 1:
        made = _fused(mixing[0], seeing[mixing[0]], answer, plain, config)
    if made is None:
        return None, ()
    own = {made.name} if isinstance(made, Fused) else set(made)
    beside = tuple(name for name in seeing if name not in own)
    return (made, beside) if _fed(attention, made, beside, args, kwargs, x, config, plain) else (None, ())


def _apart(roles: dict[str, Role]) -> tuple[str, str, str] | None:
    """The names of three projections, where there are three."""
    by = {role: [name for name, each in roles.items() if each == role] for role in ("query", "key", "value", "either")}
    if by["either"] and not by["key"]:
        by["key"], by["either"] = by["either"][:1], by["either"][1:]
    elif by["either"] and not by["value"]:
        by["value"], by["either"] = by["either"][:1], by["either"][1:]
    if by["either"] or not by["query"] or not len(by["key"]) == len(by["value"]) == 1:
        return None
    queries = by["query"]
    query = next((name for name in queries if name.rpartition(".")[2].startswith("q")), queries[0])
    return query, by["key"][0], by["value"][0]


def _seeing(attention: nn.Module, answer: Call, x: Tensor) -> dict[str, nn.Module]:
    """The modules that are handed the attention's input, by path; of those inside one another, the innermost."""
    found: dict[str, nn.Module] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Argument, ...]], None]:
        def hook(module: nn.Module, args: tuple[Argument, ...]) -> None:
            if args and args[0] is x:
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
    return {
        name: module
        for name, module in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
        and any(each.ndim > 1 for each in module.parameters())
    }


@contextmanager
def _moved(module: nn.Module, by: float, token: int, chosen: Channels) -> Iterator[None]:
    """Inside, the output of a module is moved at one token, in all channels or in chosen ones."""

    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0)).to(output)
        output = output.clone()
        output[:, token] += by * MOVE * output.square().mean().sqrt() * (noise if chosen is None else chosen(noise))
        return output

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _role(module: nn.Module, answer: Call, plain: Tensor, chosen: Channels = None) -> Role:
    """What the output of a module is to attention."""

    def change(by: float, token: int) -> Tensor:
        with _moved(module, by, token, chosen):
            return (answer() - plain)[-1]  # the row without padding

    try:
        once, twice, start = change(1.0, TOKEN), change(2.0, TOKEN), change(1.0, 0)
    except (RuntimeError, AttributeError, TypeError, IndexError):  # an output of another shape
        return "none"
    if once[:TOKEN].any() or not once.any():
        return "none"
    if not once[TOKEN + 1 :].any():
        return "query"
    if not start[0].any():
        return "key"
    later = slice(TOKEN + 1, None)
    departure = (twice - 2 * once)[later].norm() / (2 * once)[later].norm()
    return "value" if departure < STRAIGHT else "either"


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
            roles = {str(lane): _role(module, answer, plain, _third(layout, lane)) for lane in range(3)}
            if _apart(roles) == ("0", "1", "2"):
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
