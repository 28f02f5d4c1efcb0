"""sweep(target, "T=512:8192"): one cost for every value of one quantity.

T        tokens in a sequence          window   of the short-window attention (swa) in the layout
L        Transformer blocks            K        the depth window of a design that has the option `window`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from residua.lab.cost.predict import Cost, predict
from residua.lab.cost.targets import Target
from residua.options import options_of
from residua.plan import Slot
from residua.registry import design
from residua.spec import parse, render


def values_of(text: str) -> tuple[str, list[int]]:
    """`T=512:8192` is T and its doublings from 512 to 8192; `L=4,6,8` is L and these."""
    key, equals, wanted = text.partition("=")
    if not equals or key not in CHANGES:
        raise ValueError(f"--sweep {text}: write {', '.join(CHANGES)} and values, such as T=512:8192 or L=4,8,12")
    try:
        if ":" in wanted:
            first, last = map(int, wanted.split(":"))
            found = [first << turn for turn in range(64) if first > 0 and first << turn <= last]
        else:
            found = [int(one) for one in wanted.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--sweep {text}: write whole numbers from 1, as first:last for doublings or with commas")
    return key, found


def sweep(target: Target, text: str, tokens: int, **options: Any) -> dict[int, Cost]:
    """The cost at every value, in the order given."""
    key, found = values_of(text)
    costs = {}
    for value in found:
        changed, length = CHANGES[key](target, tokens, value)
        costs[value] = predict(changed.config, length, build=changed.build, **options)
    return costs


def _window(target: Target, tokens: int, value: int) -> tuple[Target, int]:
    slots = target.config.slots
    if not any(slot.kind == "swa" for slot in slots):
        raise ValueError(f"--sweep window: the layout {target.config.layout} has no swa; try --layout swa,attn,mlp")
    changed = [Slot(one.kind, {**one.options, "window": value}) if one.kind == "swa" else one for one in slots]
    layout = ",".join(map(str, changed))
    return replace(target, config=replace(target.config, layout=layout)), tokens


def _depth_window(target: Target, tokens: int, value: int) -> tuple[Target, int]:
    name, options = parse(target.config.design)
    if "window" not in options_of(design(name)):
        raise ValueError(f"--sweep K: {name} has no option window; depthswa, attnres, dca and mudd have")
    return target.of(render(name, {**options, "window": value})), tokens


CHANGES: Mapping[str, Callable[[Target, int, int], tuple[Target, int]]] = {
    "T": lambda target, tokens, value: (target, value),
    "window": _window,
    "L": lambda target, tokens, value: (replace(target, config=replace(target.config, depth=value)), tokens),
    "K": _depth_window,
}
