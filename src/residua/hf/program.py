"""What one site of a decoder layer computes, as a line of text that is read and never executed as code.

post_attention_layernorm(self_attn(lanes, **kwargs)) * self.residual_multiplier

lanes          what the design feeds attention: one input, or q, k and v side by side
x              the norm of what was read, in its first lane; without a norm, what was read
raw, zero      what was read itself; as many zeros
child(...)     a module of the layer, by its path; where it returns several things the first is meant, or `[i]`
self.name      an attribute or a parameter of the layer
name           a keyword argument of the layer; **kwargs all of them, **rest those that its forward does not name
torch.tanh(x)  one of `FUNCTIONS`;  + - * / as they are
a = ...; a[1]  a result with a name, which later sites of the layer and its return may use
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional as F

from residua.hf.anatomy import Argument, Model

Values = dict[str, Argument]


class Frame(NamedTuple):
    """What a line is about while it runs."""

    layer: Model
    values: Values
    """By name: x, lanes, raw, and the results that lines have named."""
    keywords: Values
    """What the layer was handed beside the state."""
    defaults: Mapping[str, Argument]
    """The keywords that its forward names, with what they are where they are not given."""


Evaluate = Callable[[Frame], Argument]

FUNCTIONS: Mapping[str, Callable[..., Argument]] = MappingProxyType(
    {
        "dropout": lambda layer, value, p: F.dropout(value, p, layer.training),
        "tanh": lambda layer, value: torch.tanh(value),
        "sigmoid": lambda layer, value: torch.sigmoid(value),
        "flat": lambda layer, value: value.reshape(-1, value.shape[-1]),
        "like": lambda layer, value, other: value.reshape(other.shape),
    }
)
"""What a line may use besides the layer's modules: dropout(x, p) where the layer trains, x as rows of channels, and
x in the shape of another."""

OPERATORS: Mapping[type[ast.operator], Callable[[Argument, Argument], Argument]] = MappingProxyType(
    {
        ast.Add: lambda left, right: left + right,
        ast.Sub: lambda left, right: left - right,
        ast.Mult: lambda left, right: left * right,
        ast.Div: lambda left, right: left / right,
    }
)


class Program:
    """A line, ready to run."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            body = ast.parse(text).body
            self.steps = tuple(map(_step, body))
        except (SyntaxError, _Unknown) as error:
            raise ValueError(f"the anatomy {text!r} cannot be read: {error}") from None
        if not self.steps or self.steps[-1][0] is not None:
            raise ValueError(f"the anatomy {text!r} does not end in a value")

    def __reduce__(self) -> tuple[Argument, ...]:
        return program, (self.text,)

    def __call__(self, frame: Frame) -> Argument:
        """What the line says; named results are added to the frame's."""
        made: Argument = None
        for name, evaluate in self.steps:
            made = evaluate(frame)
            if name is not None:
                frame.values[name] = made
        return made


class _Unknown(ValueError):
    """Something that a line must not hold."""


def first(value: Argument) -> Argument:
    """Of several things, the first."""
    return value[0] if isinstance(value, tuple | list) else value


@cache
def program(text: str) -> Program:
    """The line, read once."""
    return Program(text)


def path(name: str) -> tuple[str, ...]:
    """`attn.attention` as the names from a module to one inside it."""
    return tuple(name.split("."))


def child(layer: Model, names: tuple[str, ...]) -> Model:
    """The module of a layer at a path; quicker than attributes, which a module looks for in three places."""
    for name in names:
        layer = layer._modules[name]
    return layer


def _step(statement: ast.stmt) -> tuple[str | None, Evaluate]:
    if isinstance(statement, ast.Expr):
        return None, _value(statement.value)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        (target,) = statement.targets
        if isinstance(target, ast.Name):
            return target.id, _value(statement.value)
    raise _Unknown(f"{ast.unparse(statement)} is no expression")


def _value(node: ast.expr) -> Evaluate:
    """A value as it is: perhaps a tuple."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return lambda frame: value
        case ast.Name(id="zero"):
            return lambda frame: torch.zeros_like(frame.values["raw"])
        case ast.Name(id=name):
            return lambda frame: frame.values[name] if name in frame.values else _keyword(frame, name)
        case ast.Attribute():
            return _attribute(_path(node))
        case ast.Subscript(value=inner, slice=ast.Constant(value=int() as place)):
            several = _value(inner)
            return lambda frame: several(frame)[place]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            negated = _tensor(inner)
            return lambda frame: -negated(frame)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            one, other, apply = _tensor(left), _tensor(right), OPERATORS[type(operator)]
            return lambda frame: apply(one(frame), other(frame))
        case ast.Call():
            return _call(node)
    raise _Unknown(f"{ast.unparse(node)} is none of what an anatomy is made of")


def _tensor(node: ast.expr) -> Evaluate:
    """A value of which, if it is several, the first is meant."""
    value = _value(node)
    if not isinstance(node, ast.Call | ast.Name):
        return value
    return lambda frame: first(value(frame))


def _keyword(frame: Frame, name: str) -> Argument:
    return frame.keywords[name] if name in frame.keywords else frame.defaults[name]


def _attribute(path: tuple[str, ...]) -> Evaluate:
    owner, *names = path
    if owner != "self" or any(name.startswith("_") for name in names):
        raise _Unknown(f"{'.'.join(path)} is no attribute of the layer")

    def evaluate(frame: Frame) -> Argument:
        found = frame.layer
        for name in names:
            found = getattr(found, name)
        return found

    return evaluate


def _path(node: ast.expr) -> tuple[str, ...]:
    """`attn.attention` and `self_attn[0]` as the names from the layer to a module."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=inner, attr=name):
            return (*_path(inner), name)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int() as place)):
            return (*_path(inner), str(place))
    raise _Unknown(f"{ast.unparse(node)} is no path")


def _call(node: ast.Call) -> Evaluate:
    names = _path(node.func)
    given = tuple(map(_handed, node.args))
    named = tuple((each.arg, _handed(each.value)) for each in node.keywords if each.arg is not None)
    spread = [each.value.id for each in node.keywords if each.arg is None and isinstance(each.value, ast.Name)]
    if names[0] == "torch":
        function = FUNCTIONS.get(".".join(names[1:]))
        if function is None or named or spread:
            raise _Unknown(f"{ast.unparse(node)}: of torch there are {', '.join(FUNCTIONS)}, without keywords")
        chosen = function
        return lambda frame: chosen(frame.layer, *(each(frame) for each in given))
    if len(spread) > 1 or set(spread) - {"kwargs", "rest"} or sum(each.arg is None for each in node.keywords) > 1:
        raise _Unknown(f"{ast.unparse(node)}: a call ends in **kwargs or **rest")
    rest, everything = "rest" in spread, "kwargs" in spread

    def evaluate(frame: Frame) -> Argument:
        more = {name: each(frame) for name, each in named}
        if everything:
            more = {**frame.keywords, **more}
        elif rest:
            more |= {name: value for name, value in frame.keywords.items() if name not in frame.defaults}
        return child(frame.layer, names)(*(each(frame) for each in given), **more)

    return evaluate


def _handed(node: ast.expr) -> Evaluate:
    """An argument of a call: a keyword of the layer stays what it is, even several things; results are one tensor."""
    return _value(node) if isinstance(node, ast.Name) else _tensor(node)
