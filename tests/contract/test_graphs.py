"""Every design is one graph to torch.compile: every value of every option in the plain layout, every design in one that
opens with a sublayer of one lane and has three in the middle, and the plain stream in all layouts.

Tracing costs seconds a model. Whether it breaks is decided by single lines, so that what an option and a layout bring
with them is met once, and not in every combination. Nor does an option or a layout bring a new kind of operator into a
design: designs are differentiated by the compiler as they are by default, and layouts around the plain stream; options,
and designs in the other layout, are traced, which is where a graph breaks.
"""

import pytest
import torch

import residua
from residua.spec import parse
from residua.testing import LAWS, LAYOUTS, Case, assert_close, ids, specs


def covering(name):
    """The design by default, and cases that together have every option value of all its cases: the longest first."""
    chosen, met = [], set()
    for spec in sorted(specs(name), key=lambda spec: len(parse(spec)[1]), reverse=True):
        values = set(parse(spec)[1].items())
        if not values or values - met:
            chosen.append(spec)
            met |= values
    return chosen


TRACED = [Case(spec) for name in residua.names() for spec in covering(name) if spec != name]
TRACED += [Case(name, "conv,swa:window=4:mode=local,mlp") for name in residua.names()]
CASES = [Case(name) for name in residua.names()]
CASES += [Case("standard", *layout) for layout in LAYOUTS[1:]]


@pytest.mark.parametrize("name", residua.names())
def test_cases_that_are_compiled_hold_every_option_value(name):
    every, taken = (
        {pair for spec in found for pair in parse(spec)[1].items()} for found in (specs(name), covering(name))
    )
    assert taken == every
    assert name in covering(name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_design_is_one_graph(case):
    LAWS["one_graph"](case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_option_and_layout_break_no_graph(case):
    model = case.model(depth=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids()), model(ids()), "traced logits")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["delta:blocks=2", "ddl:channels=2"])
def test_inductor_gives_the_same_network(spec):
    """Compiled to machine code, forward and backward agree with eager. In float64, as the law: float32 gradients of
    DDL are as far apart as its conditioning makes the roundings of two orders of summation."""
    model = Case(spec).model(depth=1)  # machine code takes half a minute a block
    expected = model(ids())
    expected.square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    found = compiled(ids())
    assert_close(found, expected, "compiled logits")
    found.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], name, gradient=True)
