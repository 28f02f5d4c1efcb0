"""The stream is of the type the config says, in every design; and in float32 it is nearer the truth."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import residua
from residua.lab.train.diverge import Seen, watch
from residua.lab.train.subject import autocast, execution
from residua.model import Transformer, token_loss
from residua.runner import Observer, Runner, observed
from residua.runner import walk as passing
from residua.testing import error, specs
from tests.train.harness import toy_config, toy_tokens

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
IDS = torch.from_numpy(toy_tokens().train[:48].astype("int64")).reshape(2, 24)
SPECS = [spec for name in residua.names() for spec in specs(name)]


def build(spec: str, **changes):
    config = toy_config(design=spec, depth=3, layout="swa:window=4,attn,mlp", **changes)
    model = Transformer(config.model(24), seed=1 + config.seed)
    model.execution = execution(config)
    return config, model


class Types(Observer):
    """The types of all the state that a plain forward passes from site to site."""

    def __init__(self):
        self.seen = set()

    def read(self, state, site, lanes, read):
        self.seen.update(leaf.dtype for leaf in pytree.tree_leaves(state) if leaf.is_floating_point())

    def wrote(self, site, y, state):
        self.seen.update(leaf.dtype for leaf in pytree.tree_leaves(state) if leaf.is_floating_point())


@pytest.mark.parametrize("fp32_stream", [False, True], ids=["bf16-stream", "fp32-stream"])
@pytest.mark.parametrize("spec", SPECS)
def test_stream_state_has_the_type_the_config_names(spec, fp32_stream):
    config, model = build(spec, dtype="bfloat16", fp32_stream=fp32_stream)
    expected = torch.float32 if fp32_stream else torch.bfloat16
    types = Types()
    with observed(model.stream, types):
        with autocast(config, CPU):
            logits = model(IDS, checkpointed=True)
        assert types.seen == {expected}
        token_loss(logits, IDS).backward()
    assert types.seen == {expected}  # recomputed blocks too
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with autocast(config, CPU):
        seen: list[Seen] = []
        watch(model, IDS, seen.append)
        kinds = {(one.what, one.tensor.dtype) for one in seen}
    assert ("output", torch.bfloat16) in kinds  # the sublayers do compute in bfloat16
    assert {dtype for what, dtype in kinds if what == "state after its write"} == {expected}


@pytest.mark.parametrize("spec", [name for name in residua.names() if name != "elc"])
def test_stream_in_float32_is_nearer_the_float32_model(spec):
    """On average over weights: for one draw, roundings may happen to cancel. (Not elc, which keeps no sum over depth:
    there is nothing to lose, and both come to 9.75e-3.)"""
    errors = {False: 0.0, True: 0.0}
    for seed in range(8):
        _, exact = build(spec, seed=seed)
        truth = exact(IDS).detach()
        for fp32_stream in errors:
            config, model = build(spec, dtype="bfloat16", fp32_stream=fp32_stream, seed=seed)
            with autocast(config, CPU):
                errors[fp32_stream] += error(model(IDS), truth)
    assert 0 < errors[True] < errors[False]


def test_stream_type_leaves_what_is_held_twice_one_tensor():
    _, model = build("delta", dtype="bfloat16")
    state = Runner(model.stream, model.execution).open(model.embed(IDS)).state
    assert state.h is state.sources[0]


def test_float32_is_left_alone():
    config, model = build("delta")
    plain = Transformer(config.model(24), seed=1 + config.seed)
    with autocast(config, CPU):
        assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.parametrize("spec", ["hyper", "mudd", "ddl"])
def test_stream_in_float32_computes_outside_autocast(spec):
    """Its reads and writes are those without autocast, to the last bit."""
    config, model = build(spec, dtype="bfloat16", fp32_stream=True)
    for parameter in model.stream.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    runner, x = Runner(model.stream, model.execution), model.embed(IDS)
    plain = [step.lanes[0] for step in passing(runner, x, lambda site, read: x)]
    with autocast(config, CPU):
        found = [step.lanes[0] for step in passing(runner, x, lambda site, read: x)]
    assert all(map(torch.equal, found, plain))
