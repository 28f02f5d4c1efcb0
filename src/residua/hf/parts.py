"""read(trace): the sites of a decoder layer, from what it did.

    a site ends where everything that the layer does later comes through one tensor of the stream's shape
    x -> x + y        is the site whose answer is y: an addition, or a module that is handed x to add it
    x -> f(x)         anything else: its answer is f(x) - x, which is the same up to rounding

A norm before a site is a module without matrices that sees the stream alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from residua.hf.anatomy import Argument, Block, Part
from residua.hf.trace import PASSED_ON, Attribute, Keyword, Node, Ref, Trace, Unnameable, Unnamed

ADDS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
TIMES = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
SIGNS = (
    (ADDS, "+"), (TIMES, "*"), ({"sub", "__sub__", "sub_", "__isub__"}, "-"), ({"div", "__truediv__", "div_"}, "/"),
)  # fmt: skip
SHAPES = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "clone", "squeeze"}
TYPES = {"to", "float", "type_as", "expand_as"}


def weighs(module: nn.Module | None) -> bool:
    """Whether a module has matrices: a sublayer or a part of one, and neither norm nor dropout nor activation."""
    return module is not None and any(each.ndim > 1 for each in module.parameters())


def mixes(node: Node, cache: str) -> bool:
    """Whether a module may look at other tokens: it is handed a cache or a mask."""
    handed = [each.name for each in (*node.args, *node.kwargs.values()) if isinstance(each, Keyword)]
    return weighs(node.module) and any(name == cache or "mask" in name for name in handed)


def cuts(trace: Trace) -> list[int]:
    """The nodes through which everything passes, the state that comes in and the one that is returned among them."""
    out, nodes = trace.returned[0], trace.nodes
    if not isinstance(out, Ref) or out.item is not None:
        raise Unnamed("the layer does not return a tensor that it made")
    above: set[int] = set()  # what depends on the state
    for place, node in enumerate(nodes):
        if not place or any(ref.node in above for ref in node.refs()):
            above.add(place)
    used = {out.node}
    for place in range(out.node, -1, -1):
        if place in used:
            used |= {ref.node for ref in nodes[place].refs()}
    between = sorted(above & used)
    if 0 not in between:
        raise Unnamed("what the layer returns does not depend on the state that it is handed")
    found, reach = [], 0
    last = {place: place for place in between}  # the last node that uses each
    items: dict[int, set[int | None]] = {}
    for place in between:
        for ref in nodes[place].refs():
            items.setdefault(ref.node, set()).add(ref.item)
            if ref.node in last:
                last[ref.node] = max(last[ref.node], place)
    for place in between:
        alone = items.get(place, {None}) <= {None, 0}  # and not several things side by side
        if reach <= place and alone and (place == 0 or _streams(nodes[place], nodes[0])):
            found.append(place)
        reach = max(reach, last[place])
    return found


def _streams(node: Node, state: Node) -> bool:
    """Whether a result has the stream's shape, or is its rows."""
    if node.shape is None or state.shape is None or node.shape[-1] != state.shape[-1]:
        return False
    rows = 1
    for each in node.shape[:-1]:
        rows *= each
    wanted = 1
    for each in state.shape[:-1]:
        wanted *= each
    return rows == wanted


def segments(trace: Trace) -> list[tuple[int, int]]:
    """From which node to which each site goes: between cuts, with at least one sublayer in each."""
    found: list[tuple[int, int]] = []
    start, places = 0, cuts(trace)
    for end in places[1:]:
        if any(weighs(node.module) for node in trace.nodes[start + 1 : end + 1]):
            found.append((start, end))
            start = end
    if not found:
        raise Unnamed("the layer has no sublayer between its residual connections")
    found[-1] = (found[-1][0], places[-1])  # what follows the last sublayer, such as a factor, goes with it
    return found


@dataclass(slots=True)
class Writer:
    """Writes the line of one site."""

    trace: Trace
    start: int
    end: int
    cache: str
    named: tuple[str, ...]
    """The keywords that the layer's forward names."""
    attention: str | None
    """The module that is fed lanes."""
    names: dict[int, str]
    """Results that have a name already, of all sites of the layer."""
    kept: set[int] = field(default_factory=set)
    """Results that must get one, because they are used twice or returned."""
    norm: int | None = None
    exact: bool = True
    steps: list[str] = field(default_factory=list)

    def part(self, *, zeroed: bool, carried: bool) -> Part:
        """The site; `zeroed` lets a module add the stream, `carried` writes f(x) - x."""
        inside = list(enumerate(self.trace.nodes))[self.start + 1 : self.end + 1]
        mixers = [node for _, node in inside if mixes(node, self.cache)]
        main = next((node for node in mixers if node.path == self.attention), None)
        main = main or next(iter(mixers), None) or next(node for _, node in inside if weighs(node.module))
        kind = "attn" if mixers and weighs(mixers[0].module) and self._begins(mixers[0]) else "mlp"
        if kind == "mlp":
            main = next(node for _, node in inside if weighs(node.module))
        self._norm(main)
        self._name_twice()
        if carried:
            self.exact = False
            line = f"{self._text(Ref(self.end))} - raw"
        else:
            found, answer = self._answer(Ref(self.end), zeroed)
            if not found or answer is None:
                raise Unnamed("the site is no sum of the stream and something else")
            line = answer
        text = "; ".join([*self.steps, _bare(line)])
        norm = None if self.norm is None else self.trace.nodes[self.norm].path
        part = Part(kind, main.path, norm, text=text)
        for node in (None, *(node.path for _, node in inside if node.path and not weighs(node.module))):
            plain = Part(kind, main.path, norm, node)
            if plain.line == text:
                return plain
        return part

    def _begins(self, node: Node) -> bool:
        """Whether no other sublayer comes before it in its site."""
        before = self.trace.nodes[self.start + 1 : self.trace.nodes.index(node)]
        return not any(weighs(each.module) for each in before)

    def _norm(self, main: Node) -> None:
        """Find the norm that the sublayer sees the stream through."""
        nodes = self.trace.nodes
        feeds, wanted = set[int](), [nodes.index(main)]
        while wanted:
            place = wanted.pop()
            if place not in feeds and self.start < place:
                feeds.add(place)
                wanted += [ref.node for ref in nodes[place].refs()]
        for place in sorted(feeds):
            node = nodes[place]
            alone = [ref.node for ref in node.refs()] == [self.start] and len(node.args) + len(node.kwargs) == 1
            if node.module is not None and not weighs(node.module) and alone:
                self.norm = place
                return

    def _name_twice(self) -> None:
        """Results that are used more than once, or returned, get names; norms and the stream have theirs."""
        uses: dict[int, int] = {}
        for place in range(self.start + 1, len(self.trace.nodes)):
            for ref in self.trace.nodes[place].refs():
                uses[ref.node] = uses.get(ref.node, 0) + 1
        returned = {each.node for each in self.trace.returned[1:] if isinstance(each, Ref)}
        inside = range(self.start + 1, self.end)
        kept = {place for place in inside if uses.get(place, 0) > 1 or place in returned}
        for place in reversed(inside):  # a sum that is used as it is and taken apart: what it adds runs once
            if place in kept and self.trace.nodes[place].what in ADDS:
                kept |= {ref.node for ref in self.trace.nodes[place].refs() if ref.node in inside}
        self.kept = kept - {self.norm}

    def _answer(self, ref: Ref, zeroed: bool) -> tuple[bool, str | None]:
        """Whether a result is the stream and something else, and that, written; None for the stream alone."""
        if ref.node == self.start:
            return True, None
        node = self.trace.nodes[ref.node]
        if node.what in ADDS and len(node.args) == 2 and not node.kwargs:
            sides = [self._answer(each, zeroed) if isinstance(each, Ref) else (False, None) for each in node.args]
            if sum(found for found, _ in sides) == 1:
                at = next(place for place, (found, _) in enumerate(sides) if found)
                inner, other = sides[at][1], self._text(node.args[1 - at])
                if inner is None:
                    return True, other
                self.exact = False  # the stream was added before this, and is added after it now
                return True, f"({inner} + {other})" if at == 0 else f"({other} + {inner})"
            return False, None
        if node.what in SHAPES | TYPES and isinstance(node.args[0], Ref):
            found, inner = self._answer(node.args[0], zeroed)
            return found, f"torch.like({inner}, raw)" if inner is not None and node.what in SHAPES else inner
        if zeroed and node.module is not None and any(each.node == self.start for each in node.refs()):
            text, returned = self._call(ref.node, zeroed=True), self.trace.returned[1:]
            if any(isinstance(each, Ref) and each.node == ref.node for each in returned):
                self.names[ref.node] = f"y{len(self.names)}"
                self.steps.append(f"{self.names[ref.node]} = {text}")
                return True, f"{self.names[ref.node]}[0]"
            return True, text
        return False, None

    def _text(self, value: Argument) -> str:
        """A value, written."""
        if isinstance(value, Ref):
            return self._result(value)
        if isinstance(value, Keyword):
            return value.name
        if isinstance(value, Attribute):
            if any(part.isdigit() for part in value.path.split(".")):
                raise Unnamed(f"self.{value.path} has no name of its own")
            return f"self.{value.path}"
        if isinstance(value, Unnameable) or not (value is None or isinstance(value, bool | int | float | str)):
            raise Unnamed(f"something is handed a {getattr(value, 'type', value)} that the layer was not handed")
        return repr(value)

    def _result(self, ref: Ref) -> str:
        if ref.node == self.norm:
            return "x"
        if ref.node == self.start:
            return "raw"
        if ref.node < self.start and ref.node not in self.names:
            raise Unnamed("a site uses what an earlier one read")
        if ref.node in self.names:
            item = 0 if ref.item is None and self._several(ref.node) else ref.item
            return self.names[ref.node] + ("" if item is None else f"[{item}]")
        text = self._node(ref.node)
        if ref.node in self.kept:
            name = f"y{len(self.names)}"
            self.steps.append(f"{name} = {_bare(text)}")
            self.names[ref.node] = name
            return self._result(ref)
        return text if not ref.item else f"{text}[{ref.item}]"

    def _several(self, place: int) -> bool:
        refs = [*self.trace.returned, *(ref for node in self.trace.nodes for ref in node.refs())]
        return any(isinstance(ref, Ref) and ref.node == place and ref.item is not None for ref in refs)

    def _node(self, place: int) -> str:
        node = self.trace.nodes[place]
        if node.module is not None:
            return self._call(place)
        for names, sign in SIGNS:
            if node.what in names and len(node.args) == 2 and not node.kwargs:
                left, right = map(self._text, node.args)
                return f"({right} {sign} {left})" if node.what.startswith("__r") else f"({left} {sign} {right})"
        if node.what == "dropout":
            p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            return f"torch.dropout({self._text(node.args[0])}, {self._text(p)})"
        if node.what in ("tanh", "sigmoid") and len(node.args) == 1:
            return f"torch.{node.what}({self._text(node.args[0])})"
        if node.what in TYPES:
            return self._text(node.args[0])
        if node.what in SHAPES and node.shape is not None and _streams(node, self.trace.nodes[0]):
            inner = _bare(self._text(node.args[0]))
            return f"torch.like({inner}, raw)" if node.shape == self.trace.nodes[0].shape else f"torch.flat({inner})"
        raise Unnamed(f"between its modules the layer calls {node.what}, which an anatomy does not have")

    def _call(self, place: int, *, zeroed: bool = False) -> str:
        node = self.trace.nodes[place]
        assert node.module is not None
        first = next(iter(inspect.signature(node.module.forward).parameters), None)
        args, kwargs = list(node.args), dict(node.kwargs)
        if not args and first in kwargs and isinstance(kwargs[first], Ref):
            args = [kwargs.pop(first)]
        rest = kwargs.pop(PASSED_ON, False) is None
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if not (rest and value == Keyword(name) and name not in self.named)
        }
        own = all(kwargs.get(name) == Keyword(name) for name in self.named)
        shown = (
            []
            if rest and own
            else [f"{name}={_bare(self._given(value, node, zeroed))}" for name, value in kwargs.items()]
        )
        if rest and own:
            others = {name: value for name, value in kwargs.items() if name not in self.named}
            shown = [f"{name}={_bare(self._given(value, node, zeroed))}" for name, value in others.items()]
        given = [_bare(self._given(value, node, zeroed)) for value in args]
        return (
            f"{_path(node.path)}({', '.join([*given, *shown, *(['**kwargs' if own else '**rest'] if rest else [])])})"
        )

    def _given(self, value: Argument, node: Node, zeroed: bool) -> str:
        """An argument of a module: the stream is x where there is no norm, and attention is fed lanes."""
        if zeroed and isinstance(value, Ref) and value.node == self.start:
            return "zero"
        text = self._text(value)
        if text == "raw" and self.norm is None and weighs(node.module):
            text = "x"
        if mixes(node, self.cache) and (self.attention is None or node.path == self.attention):
            text = _lanes(text)
        return text


def _lanes(text: str) -> str:
    return "lanes" if text == "x" else text.replace("(x * ", "(lanes * ")


def _bare(text: str) -> str:
    """Without a pair of brackets around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def _path(path: str) -> str:
    first, *others = path.split(".")
    return first + "".join(f"[{each}]" if each.isdigit() else f".{each}" for each in others)


def read(trace: Trace, named: tuple[str, ...], cache: str, attention: str | None) -> Iterator[tuple[Block, bool]]:
    """The ways in which a layer may be built, the most exact first, and whether each is exact.

    named:      the keywords that its forward names.
    cache:      the one under which it is handed the cache.
    attention:  the module whose q, k and v can have inputs of their own.
    """
    for zeroed, carried in ((False, False), (True, False), (False, True)):
        names: dict[int, str] = {}
        parts, exact = [], True
        try:
            for start, end in segments(trace):
                part, sure = _site(trace, start, end, cache, named, attention, names, zeroed=zeroed, carried=carried)
                parts.append(part)
                exact = exact and sure
            returns = _returns(trace, names)
        except Unnamed as error:
            if carried:
                raise error
            continue
        yield Block(tuple(parts), None, returns=returns), exact


def _site(
    trace: Trace, start: int, end: int, cache: str, named: tuple[str, ...], attention: str | None,
    names: dict[int, str], *, zeroed: bool, carried: bool,
) -> tuple[Part, bool]:  # fmt: skip
    """One site; those that need neither are written without."""
    for ways in ((False, False), (zeroed, False), (zeroed, carried)):
        writer = Writer(trace, start, end, cache, named, attention, dict(names))
        try:
            part = writer.part(zeroed=ways[0], carried=ways[1])
        except Unnamed as error:
            last = error
            continue
        names.update(writer.names)
        return part, writer.exact
    raise last


def _returns(trace: Trace, names: dict[int, str]) -> tuple[str, ...] | None:
    """What is returned behind the state."""
    if not trace.several:
        return None
    lines = []
    for each in trace.returned[1:]:
        if isinstance(each, Ref) and each.node in names:
            lines.append(names[each.node] + ("" if each.item is None else f"[{each.item}]"))
        elif isinstance(each, Keyword):
            lines.append(each.name)
        elif isinstance(each, Ref):
            raise Unnamed("the layer returns what no site made")
        elif each is None or isinstance(each, bool | int | float | str):
            lines.append(repr(each))
        else:
            raise Unnamed("the layer returns something that it has no name for")
    return tuple(lines)
