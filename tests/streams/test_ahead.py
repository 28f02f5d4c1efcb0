"""Two-phase reads change nothing but the time: designs with groups of any size give the network of single reads."""

import pytest
import torch

from residua.streams import _ahead
from residua.testing import LAWS, Case, assert_close, ids, specs

SPECS = [spec for name in ("attnres", "delta") for spec in specs(name)]
KEPT = ("pure", "state_is_tensors", "checkpointing", "cut_anywhere", "weights_reproduce_the_read", "causal", "decode")


def run(case):
    model = case.model()  # in float64: the ops are held to their float32 rows by their own tests
    logits = model(ids())
    logits.square().mean().backward()
    return logits, {name: one.grad for name, one in model.named_parameters()}


@pytest.fixture
def always(monkeypatch):
    """Groups, however few the tokens."""
    monkeypatch.setattr(_ahead, "LEAST", 0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("group", [2, 3, 8])
def test_ahead_groups_give_the_network_of_single_reads(spec, group, monkeypatch):
    logits, gradients = run(Case(spec))
    monkeypatch.setattr(_ahead, "LEAST", 0)
    monkeypatch.setattr(_ahead, "GROUP", group)
    grouped, found = run(Case(spec))
    assert_close(grouped, logits, "logits")
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, name, gradient=True)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("law", KEPT)
def test_ahead_groups_obey_the_law(law, spec, always):
    LAWS[law](Case(spec))


@pytest.mark.parametrize(("spec", "groups"), [("attnres", True), ("delta", True), ("delta:blocks=2", True),
                                              ("attnres:window=1", False), ("delta:centered=true", False)])  # fmt: skip
def test_ahead_groups_run_where_they_can(spec, groups, always, monkeypatch):
    """The state carries reads ahead for the designs that a group can serve, and nothing for the others."""
    model, seen = Case(spec).model(dtype=torch.float32), []
    write = model.stream.write
    monkeypatch.setattr(model.stream, "write", lambda *args: seen.append(write(*args)) or seen[-1])
    model(ids())
    assert any(state.ahead.reads for state in seen) == groups


BLOCKS = [
    "delta:blocks=2",
    "delta:blocks=2,gate=alpha",
    "delta:blocks=2,gate=scalar,null=true",
    "delta:block=3,gate=vector",
    "delta:blocks=2,value_lane=true",
    "delta:blocks=2,value_lane=true,gate=alpha,null=true",
]


@pytest.mark.parametrize("spec", BLOCKS)
@pytest.mark.parametrize("group", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ahead_makes_the_reads_of_a_block_at_once_without_gradients(spec, group, dtype, monkeypatch):
    """They are complete when the block before them closes; what comes out is what single reads give."""
    monkeypatch.setattr(_ahead, "GROUP", group)
    model, seen = Case(spec).model(dtype=dtype), []
    for parameter in model.stream.parameters():  # bfloat16 models keep their routing in float32
        parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    single = model(ids()).detach()
    write = model.stream.write
    monkeypatch.setattr(model.stream, "write", lambda *args: seen.append(write(*args)) or seen[-1])
    with torch.no_grad():
        found = model(ids())
    assert any(state.ahead.complete for state in seen)
    assert not any(state.ahead.reads for state in seen)
    if dtype == torch.bfloat16:  # the gate's product is rounded in one form and not in the other
        assert (found - single).float().norm() < 0.02 * single.float().norm()
    else:
        assert_close(found, single, "logits")


def test_ahead_makes_single_reads_of_what_cannot_be_read_at_once(monkeypatch):
    """Parameters in bfloat16 are not taken where they lie."""
    model, seen = Case("delta:blocks=2").model(dtype=torch.bfloat16), []
    write = model.stream.write
    monkeypatch.setattr(model.stream, "write", lambda *args: seen.append(write(*args)) or seen[-1])
    with torch.no_grad():
        model(ids())
    assert seen
    assert not any(state.ahead.complete for state in seen)
