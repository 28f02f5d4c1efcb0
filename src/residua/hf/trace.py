"""watch(layer): what a decoder layer does when it runs, as a graph of its modules and of the functions between them.

    node 0         the residual stream that came in
    node i         a module that was called, or a torch function, with what it was handed

What happens inside a module stays inside it: the modules that the layer itself calls are the leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from residua.hf.anatomy import Argument, Model

PASSED_ON = "residua_passed_on"
"""A keyword that no module knows: who receives it is handed all keywords that the layer's forward does not name."""


class Ref(NamedTuple):
    """The result of a node, or the item at a place of it."""

    node: int
    item: int | None = None


class Keyword(NamedTuple):
    """An argument of the layer, by its name."""

    name: str


class Attribute(NamedTuple):
    """An attribute, a parameter or a buffer of the layer, by its path."""

    path: str


@dataclass(slots=True)
class Node:
    """Something that ran."""

    what: str
    """`module` or the name of a function."""
    path: str = ""
    """Of a module, from the layer."""
    args: tuple[Argument, ...] = ()
    """What it was handed: a Ref, a Keyword, an Attribute, or a number or word as it is."""
    kwargs: dict[str, Argument] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    """Of its result, if that is one tensor or begins with one."""

    module: nn.Module | None = None
    given: tuple[tuple[Argument, ...], dict[str, Argument]] = ((), {})
    """What a module was handed, itself."""

    def refs(self) -> list[Ref]:
        """The results that it was handed."""
        return [each for each in (*self.args, *self.kwargs.values()) if isinstance(each, Ref)]


@dataclass(slots=True)
class Trace:
    """What ran, in order, and what the layer returned."""

    nodes: list[Node]
    returned: tuple[Argument, ...] = ()
    """What came back, the state first; of a layer that returns one tensor, that alone."""
    several: bool = False
    """Whether the layer returned a tuple."""
    made: list[Argument] = field(default_factory=list)
    """What every node made."""


class Unnamed(ValueError):
    """Something in a layer that an anatomy has no name for."""


class Watch(TorchFunctionMode):
    """Records what runs at the level of one layer, while it is entered."""

    def __init__(self, layer: Model, state: Tensor, keywords: dict[str, Argument]) -> None:
        super().__init__()
        self.layer, self.keywords = layer, keywords
        self.nodes = [Node("state", shape=tuple(state.shape))]
        self.known: dict[int, Ref] = {id(state): Ref(0)}
        self.held: list[Argument] = [state]  # what is alive keeps its id
        self.depth = 0
        self.calls: list[Node] = []
        self.tensors = {id(each): name for name, each in (*layer.named_parameters(), *layer.named_buffers())}

    def __torch_function__(
        self, func: Argument, types: Argument, args: Argument = (), kwargs: Argument = None
    ) -> Argument:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self.depth or not _holds_tensors(made):
            return made
        name = getattr(func, "__name__", str(func))
        handed = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if not any(id(each) in self.known for each in handed):
            return made
        if name in SAME and any(made is each for each in handed):
            return made  # nothing was done: no change of type or shape was needed
        if isinstance(made, Tensor) and name == "dropout" and any(made is each for each in handed):
            made = made.clone()  # a result of its own, though nothing is dropped in evaluation
        node = Node(
            name, args=tuple(map(self.named, args)), kwargs={key: self.named(each, key) for key, each in kwargs.items()}
        )
        self.add(node, made)
        return made

    def named(self, value: Argument, key: str | None = None) -> Argument:
        """What a value is called."""
        if isinstance(value, Tensor) and id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, Tensor) and id(value) in self.tensors:
            return Attribute(self.tensors[id(value)])
        if key is not None and key in self.keywords and self.keywords[key] is value:
            return Keyword(key)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return self._constant(value)
        for name, each in self.keywords.items():
            if each is value:
                return Keyword(name)
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            return tuple(value)
        return value if isinstance(value, torch.dtype | torch.device) else Unnameable(type(value).__name__)

    def _constant(self, value: float) -> Argument:
        """A number, by the name that the layer has for it."""
        names = [name for name, each in vars(self.layer).items() if isinstance(each, float) and each == value]
        return Attribute(names[0]) if len(names) == 1 else value

    def add(self, node: Node, made: Argument) -> None:
        """Take in a node and what it made."""
        place, several = len(self.nodes), isinstance(made, tuple | list)
        self.nodes.append(node)
        self.held.append(made)
        leading = made[0] if several and made else made
        node.shape = tuple(leading.shape) if isinstance(leading, Tensor) else None
        for item, each in enumerate(made if several else [made]):
            if isinstance(each, Tensor):
                self.known[id(each)] = Ref(place, item if several else None)

    def before(self, path: str, module: nn.Module, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
        """A module is called."""
        if not self.depth:
            names = [*inspect.signature(module.forward).parameters, *[None] * len(args)]
            given = tuple(self.named(each, name) for each, name in zip(args, names, strict=False))
            named = {key: self.named(each, key) for key, each in kwargs.items()}
            self.calls.append(Node("module", path, given, named, module=module, given=(args, kwargs)))
        self.depth += 1

    def after(self, made: Argument) -> Argument:
        """It has returned."""
        self.depth -= 1
        if self.depth:
            return None
        with torch._C.DisableTorchFunction():  # what is done here is no part of the layer
            node, fresh = self.calls.pop(), None
            if isinstance(made, Tensor) and id(made) in self.known:
                made = fresh = made.clone()  # of a module that changes nothing here, such as dropout: its own result
            self.add(node, made)
        return fresh


def _holds_tensors(made: Argument) -> bool:
    return isinstance(made, Tensor) or (
        isinstance(made, tuple | list) and any(isinstance(each, Tensor) for each in made)
    )


class Unnameable(NamedTuple):
    """An argument that has no name."""

    type: str


SAME = {"to", "float", "contiguous", "type_as", "type", "view", "reshape"}
"""Functions that return what they were handed if there is nothing to do."""


@contextmanager
def watching(layer: Model, state: Tensor, keywords: dict[str, Argument]) -> Iterator[Watch]:
    """Inside, what the layer runs is recorded."""
    watch = Watch(layer, state, keywords)
    handles = []
    for path, module in layer.named_modules():
        if path:
            handles += [
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, path=path: watch.before(path, module, args, kwargs), with_kwargs=True
                ),
                module.register_forward_hook(lambda module, args, made: watch.after(made)),
            ]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def trace(layer: Model, forward: Argument, state: Tensor, keywords: dict[str, Argument]) -> tuple[Trace, Argument]:
    """What a layer does to a state, and what it returns."""
    with watching(layer, state, keywords) as watch:
        made = forward(state, **keywords, **{PASSED_ON: None}) if takes_more(forward) else forward(state, **keywords)
    several = isinstance(made, tuple | list)
    returned = tuple(watch.named(each) for each in (made if several else [made]))
    return Trace(watch.nodes, returned, several, watch.held), made


def takes_more(forward: Argument) -> bool:
    """Whether a forward takes keywords that it does not name."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())
