"""Every design is one graph to torch.compile: all cases in the plain layout, the designs alone in the others.

Tracing costs seconds a model; the option cases differ inside the stream and the layouts outside it, so that their
product is covered by the two sides.
"""

import pytest
import torch

import residua
from residua.testing import LAWS, LAYOUTS, Case, assert_close, ids, specs

CASES = [Case(spec) for name in residua.names() for spec in specs(name)]
CASES += [Case(name, *layout) for name in residua.names() for layout in LAYOUTS[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_design_is_one_graph(case):
    LAWS["one_graph"](case)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["delta:blocks=2", "ddl:channels=2"])
def test_inductor_gives_the_same_network(spec):
    """Compiled to machine code, forward and backward agree with eager."""
    model = Case(spec).model(dtype=torch.float32, depth=2)
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
