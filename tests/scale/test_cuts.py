"""What crosses a boundary: the labels make a network again, and the tables of `routes` hold what was measured once."""

from itertools import product

import pytest
import torch
from torch.utils import _pytree as pytree

import residua
from residua.model import ModelConfig, Transformer
from residua.registry import wrappers
from residua.runner import Flow, Runner
from residua.scale.cuts import Cuts, even, links, looped, routes
from residua.testing import PLAIN, Case, ids, specs

EVERY = [spec for name in residua.names() for spec in specs(name)]
EVERY += [case for wrapper in wrappers().values() for case in wrapper.cases]


def cuts_of(design: str, depth: int = 48, width: int = 16) -> Cuts:
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab=64, width=width, depth=depth, heads=2, eps=0.0, design=design))
    return Cuts.of(model, 1, 4)


def counted(cuts: Cuts, ranks: int, virtual: int, incremental: bool) -> list[int]:
    stages = ranks * virtual
    plan = routes(cuts, even(len(cuts.at) - 1, stages), looped(stages, ranks), incremental=incremental)
    return [link.tensors for link in links(cuts, plan)]


@pytest.mark.parametrize(
    ("design", "ranks", "virtual", "whole", "fewer"),
    [
        ("attnres:blocks=8", 4, 2, 35, 21),
        ("attnres:blocks=8", 4, 4, 79, 31),
        ("attnres:blocks=8", 8, 2, 79, 55),
        ("attnres", 4, 2, 343, 219),
    ],
)
def test_incremental_transport_sends_fewer_tensors(design, ranks, virtual, whole, fewer):
    cuts = cuts_of(design)
    assert sum(counted(cuts, ranks, virtual, False)) == whole
    assert sum(counted(cuts, ranks, virtual, True)) == fewer


def test_boundaries_of_attention_residuals():
    cuts = cuts_of("attnres:blocks=8")
    assert counted(cuts, 4, 2, False) == [2, 3, 4, 5, 6, 7, 8]
    assert counted(cuts, 4, 2, True) == [2, 3, 4, 3, 3, 3, 3]


@pytest.mark.parametrize("design", ["standard", "depthswa", "hyper", pytest.param("mhc", marks=pytest.mark.slow)])
def test_a_state_that_is_rewritten_whole_gains_nothing(design):
    cuts = cuts_of(design, 16)
    assert counted(cuts, 4, 2, True) == counted(cuts, 4, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize("design", EVERY)
def test_labels_make_the_network_again(design):
    """Through every boundary by label, with only the tensors that a stage is said to hold: the logits of the model."""
    case = Case(design)
    model = case.model()
    model.execution = PLAIN  # groups of reads round differently
    with torch.device("meta"):
        meta = Transformer(case.config()).double()
    cuts, depth = Cuts.of(meta, 2, 9), case.config().depth
    assert set(cuts.users) == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert all(cuts.users.values()), "a parameter that no block uses"
    with torch.no_grad():
        runner, context = Runner(model.stream, PLAIN), model.context(ids())
        state = runner.open(model.embed(ids()), None, ids()).state
        for layer, block in enumerate(model.blocks):
            boundary = cuts.at[layer]
            found = boundary.tensors(state)
            for label, tensor in found.items():
                assert (tensor.shape, tensor.dtype) == (cuts.like[label].shape, cuts.like[label].dtype)
            for leaf, at in zip(pytree.tree_leaves(state), boundary.leaves, strict=True):
                assert leaf is found[boundary.labels[at]], "one label, two tensors"
            state = block.alone(boundary.state(found), runner, context)
        state = cuts.at[depth].state(cuts.at[depth].tensors(state))
        (x,) = runner.read(Flow(state), model.plan.head, model.norm).lanes
        assert torch.equal(model.logits(x), model(ids()))


@pytest.mark.slow
@pytest.mark.parametrize("design", EVERY)
def test_every_stage_has_what_it_needs(design):
    """Received or kept: each label that a stage needs is there, once, and came from where it was."""
    cuts = cuts_of(design, 6)
    for ranks, virtual, incremental in product((1, 2, 3), (1, 2), (False, True)):
        stages = ranks * virtual
        plan = routes(cuts, even(6, stages), looped(stages, ranks), incremental=incremental)
        depots = {rank: set() for rank in range(ranks)}
        for route in plan:
            needed = set(cuts.at[route.layers.start].labels) if route.stage else set()
            assert set(route.inbox) | set(route.taken) == needed
            assert not set(route.inbox) & set(route.taken)
            assert set(route.taken) <= depots[route.rank]
            assert not route.stage or any(cuts.like[label].requires_grad for label in route.inbox)
            made = set(cuts.at[route.layers.stop].labels)
            assert set(route.outbox) <= made
            assert set(route.kept) <= made | needed
            depots[route.rank] |= set(route.kept)
        assert not any(route.taken for route in plan) or incremental
        assert sum(route.last_here for route in plan) == ranks


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match="4 blocks make at most 4 pipeline stages, not 5"):
        even(4, 5)
    assert [len(one) for one in even(7, 3)] == [2, 2, 3]


def test_loops_are_refused():
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab=8, width=16, depth=4, heads=2, layout="attn,mlp,loop:passes=2"))
    with pytest.raises(ValueError, match="cannot be cut into pipeline stages"):
        Cuts.of(model, 1, 4)
