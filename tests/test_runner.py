"""Reads that share a pass change nothing but the time. (That they give the network of single reads is a law.)"""

import pytest
import torch

import residua
from residua.plan import Plan
from residua.read_groups import _coming
from residua.runner import Execution, Observer, Runner, observed
from residua.testing import GROUPED, LAWS, PLAIN, Case, assert_close, ids, specs

SPECS = [spec for name in ("attnres", "delta", "delta_released") for spec in specs(name)]


class Kept(Runner):
    """A runner that remembers what flowed."""

    def write(self, flow, site, read, y):
        after = super().write(flow, site, read, y)
        self.__dict__.setdefault("flows", []).append(after)
        return after


def flows(model, execution=GROUPED, **options):
    """What passed from site to site, and the logits."""
    runner = Kept(model.stream, execution, **options)
    *_, head = model.walk(ids(), runner)
    return runner.flows, model.logits(head.read.lanes[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("group", [2, 3, 8])
def test_groups_of_any_size_give_the_network_of_single_reads(spec, group):
    model = Case(spec).model()  # in float64: the ops are held to their float32 rows by their own tests
    for blockwise in (False, True):
        grouped = flows(model, Execution(group=group, least=0), blockwise=blockwise)[1]
        assert_close(grouped, flows(model, PLAIN)[1], "logits")


@pytest.mark.parametrize(("spec", "groups"), [("attnres", True), ("delta", True), ("delta:blocks=2", True),
                                              ("attnres:window=1", False), ("delta:centered=true", False),
                                              ("delta_released:null=true", False), ("mudd", False)])  # fmt: skip
def test_groups_run_where_they_can(spec, groups):
    """Reads are begun ahead for the designs that a group can serve, and nothing is for the others."""
    seen, _ = flows(Case(spec).model(dtype=torch.float32))
    assert any(flow.ahead.begun for flow in seen) == groups


def test_few_reads_share_a_pass_over_few_sources():
    """A read merges what came since its pass began, one by one: while there is little to share, that is the dearer."""
    stream = residua.build("delta", Plan.regular(8, 24))
    sizes = [len(coming.sites) for coming in _coming(stream, 16, blockwise=False)[2:-18] if coming is not None]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (4, 14)
    whole = residua.build("delta:blocks=2", Plan.regular(8, 6))  # inside a block nothing comes
    assert len(_coming(whole, 16, blockwise=False)[6].sites) == 6


@pytest.mark.parametrize("spec", ["attnres", "delta", "delta:block=2", "delta:value_lane=true"])
def test_nothing_is_begun_across_a_cut(spec):
    """A block that is cut from the next begins no read for it, and what crosses is the state."""
    model = Case(spec, "swa:window=3,attn,mlp").model()
    seen, _ = flows(model, blockwise=True)
    ends = {block[-1].index for block in map(model.plan.block, range(3))}
    assert any(flow.ahead.begun for flow in seen)
    for index, flow in enumerate(seen):
        assert not (index in ends and flow.ahead.begun), f"reads of the next block after site {index}"
        assert Runner.cut(flow) is flow.state


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
def test_the_reads_of_a_block_are_made_at_once_without_gradients(spec, group, dtype):
    """They are complete when the block before them closes; what comes out is what single reads give."""
    model = Case(spec).model(dtype=dtype)
    for parameter in model.stream.parameters():  # bfloat16 models keep their routing in float32
        parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    single = flows(model, PLAIN)[1].detach()
    with torch.no_grad():
        seen, found = flows(model, Execution(group=group))
    assert any(flow.ahead.made for flow in seen)
    assert not any(flow.ahead.begun for flow in seen)
    if dtype == torch.bfloat16:  # the gate's product is rounded in one form and not in the other
        assert (found - single).float().norm() < 0.02 * single.float().norm()
    else:
        assert_close(found, single, "logits")


def test_what_cannot_be_read_at_once_is_read_singly():
    """Parameters in bfloat16 are not taken where they lie."""
    with torch.no_grad():
        seen, _ = flows(Case("delta:blocks=2").model(dtype=torch.bfloat16), Execution())
    assert seen
    assert not any(flow.ahead.made for flow in seen)


@pytest.mark.parametrize("spec", ["attnres", "delta"])
def test_gradients_survive_a_frozen_lower_half_at_the_size_of_training(spec):
    """b t d of 65536, where groups begin by themselves: the queries above a part that ran without gradients."""
    model = Case(spec).model(width=64, heads=4)
    tokens = ids(8, 128)
    found = []
    for model.execution in (PLAIN, Execution()):
        runner = Runner(model.stream, model.execution)
        context, flow = model.context(tokens), None
        with torch.no_grad():
            flow = runner.open(model.embed(tokens))
            for block in model.blocks[:1]:
                flow = block(flow, runner, context)
        for block in model.blocks[1:]:
            flow = block(flow, runner, context)
        model.zero_grad()
        model.logits(runner.read(flow, model.plan.head, model.norm).lanes[0]).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.stream.named_parameters() if p.grad is not None})
    plain, grouped = found
    assert plain.keys() == grouped.keys()
    assert len(plain) > 4
    for name, gradient in plain.items():
        assert_close(grouped[name], gradient, name, gradient=True)


@pytest.mark.parametrize("spec", ["denseformer", "postnorm"])  # the second calls no norm
def test_an_observer_can_change_what_is_read(spec):
    class Doubled(Observer):
        def lanes(self, state, site, lanes):
            return tuple(2 * lane for lane in lanes) if site.name == "l1_attn" else lanes

    model = Case(spec).model()
    seen = []

    class Seen(Observer):
        def read(self, state, site, lanes, read):
            seen.append((site.name, lanes[0], read.carry))

    plain = model(ids())
    with observed(model.stream, Doubled(), Seen()):
        changed = model(ids())
    assert (changed - plain).abs().max() > 1e-6
    readers = model.plan.readers
    assert [name for name, *_ in seen] == [site.name for site in readers]
    assert all(carry is lane for _, lane, carry in seen)  # what a design carries on follows the change
    assert [len(step.lanes) for step in model.walk(ids())] == [1] * len(readers)
    assert torch.equal(model(ids()), plain)


def test_an_observer_can_change_what_a_design_with_its_own_norm_has_read():
    seen = []

    class Doubled(Observer):
        def lanes(self, state, site, lanes):
            seen.append((site.name, lanes[0]))
            return tuple(2 * lane for lane in lanes) if site.name == "l1_attn" else lanes

        def read(self, state, site, lanes, read):
            assert all(one is other for one, other in zip(lanes, read.lanes, strict=True))

    model = Case("gated").model()
    plain = model(ids())
    with observed(model.stream, Doubled()):
        changed = model(ids())
    assert [name for name, _ in seen] == [site.name for site in model.plan.readers]
    assert (changed - plain).abs().max() > 1e-6


def test_a_law_sees_a_stale_group(monkeypatch):
    """Reads made without gradients and used with them: the fault that the law of gradient modes is there for."""
    from residua.read_groups import ReadGroups

    plain = ReadGroups.lanes

    def stale(self, state, ahead, site):
        with torch.no_grad():
            return plain(self, state, ahead, site)

    monkeypatch.setattr(ReadGroups, "lanes", stale)
    with pytest.raises(AssertionError, match="gradient"):
        LAWS["gradient_mode"](Case("delta:block=2"))
