"""What `record_routing` sees, and that watching changes nothing."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

import residua
from residua.lab.diagnose import ablate_sources, record_routing
from residua.lab.diagnose.record import in_deep_third
from residua.lab.train.subject import autocast, execution
from residua.model import Cache, Transformer, token_loss
from residua.runner import Runner
from residua.testing import Case, assert_close, ids, walk
from tests.diagnose.hosted import Hosted
from tests.train.harness import toy_config

SPECS = (
    "standard", "elc", "denseformer", "vertical", "dca", "mudd", "mudd:prepost=all", "attnres", "attnres:block=2",
    "attnres:heads=2", "delta", "delta:value_lane=true,gate=vector", "delta:centered=true", "delta:null=true",
    "delta_released:blocks=3,null=true", "ddl", "ddl:channels=2,start=standard", "depthswa",
    "depthswa:enter=add,gate=alpha", "hyper", "mhc", "lambdas:skips=unet", "lambdas:each=sublayer", "frac:fractions=2",
    "laurel:weights=free", "altup:ple=3,laurel=2", "lr_attnres:block=2", "lr_attnres:key=sliced,rank=3", "multigate",
    "highway:form=muse", "postnorm", "postnorm:form=siamese", "gated", "mhc:model=deepseek-v4.1", "delta:value=mixed",
)  # fmt: skip


def gradients(model, tokens, **options):
    model.zero_grad()
    output = model(tokens, **options)
    token_loss(getattr(output, "logits", output), tokens.roll(-1, 1)).backward()


def flat(found, where=""):
    """Every number of a summary by its path."""
    if isinstance(found, dict):
        return {k: v for key, value in found.items() for k, v in flat(value, f"{where}/{key}").items()}
    if isinstance(found, list):
        return {k: v for place, value in enumerate(found) for k, v in flat(value, f"{where}/{place}").items()}
    return {where: found}


def assert_same(one, other):
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), key


def test_specs_cover_every_design():
    assert {spec.partition(":")[0] for spec in SPECS} == set(residua.names())


@pytest.mark.parametrize("spec", SPECS)
def test_record_holds_what_the_stream_applies(spec):
    model = Case(spec).model().requires_grad_(False)  # a recorder asks for no gradients, and may get the kernel's bits
    with record_routing(model) as record:
        model(ids())
    for site, state, _ in walk(model, ids()):
        seen, expected = record[site.name], model.stream.weights(state, site)
        assert seen.sources == model.stream.sources(site)
        assert (seen.weights is None) == (expected is None)
        if expected is not None:
            assert torch.equal(seen.weights, expected)
            assert record.weights()[site.name] is seen.weights
        given: list[torch.Tensor] = []  # to the norm, if one is called
        read = model.stream.read(state, site, lambda *lanes, given=given: given.extend(lanes) or lanes)
        raw = torch.stack(given or list(read.lanes))
        assert seen.summary()["stream_rms"] == pytest.approx(raw.square().mean().sqrt().item())
    json.dumps(record.summary(), allow_nan=False)


@pytest.mark.parametrize("spec", SPECS)
def test_record_changes_no_bit_and_leaves_no_trace(spec):
    model = Case(spec).model()
    gradients(model, ids())
    plain, wanted = model(ids()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    attributes = dict(vars(model.stream))
    with record_routing(model, gradients=True):
        assert torch.equal(model(ids()), plain)
        gradients(model, ids())
    assert vars(model.stream) == attributes
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, wanted[name])


@pytest.mark.parametrize("spec", SPECS)
def test_record_counts_a_checkpointed_site_once(spec):
    model = Case(spec).model()
    summaries = []
    for checkpointed in (False, True):
        with record_routing(model, gradients=True) as record:
            gradients(model, ids(), checkpointed=checkpointed)
            gradients(model, ids(), checkpointed=checkpointed)
        summaries.append(record.summary())
    assert summaries[1]["forwards"] == 2
    assert_same(*summaries)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_record_of_a_hosted_model_is_that_of_ours(reentrant):
    hosted = Hosted("hyper", reentrant)  # its state is one tensor: a reentrant checkpoint takes no tuples of them
    with record_routing(hosted.inner, gradients=True) as own:
        gradients(hosted.inner, ids())
    with record_routing(hosted, gradients=True) as record:
        gradients(hosted, ids())
    assert_same(record.summary(), own.summary())


def test_record_of_two_forwards_before_one_backward_counts_two():
    model = Case("delta").model()
    with record_routing(model) as record:
        loss = model(ids(), checkpointed=True).square().mean() + model(ids(1, 5), checkpointed=True).square().mean()
        loss.backward()
    with record_routing(model) as plain, torch.no_grad():
        model(ids())
        model(ids(1, 5))
    assert record.tokens == 18 + 5
    assert_same(record.summary(), plain.summary())


def test_record_averages_over_tokens_not_over_forwards():
    model = Case("attnres").model()
    rows = ids(5, 9)
    with record_routing(model) as whole:
        model(rows)
    with record_routing(model) as parts:
        with torch.inference_mode():
            model(rows[:1])
        with torch.no_grad():
            model(rows[1:])
    one, two = whole.summary(), parts.summary()
    assert (one.pop("forwards"), two.pop("forwards")) == (1, 2)
    assert_same(one, two)
    assert parts["head"].weights.shape[2] == 4  # the last forward's


def test_record_counts_a_site_read_twice_once():
    """Of two writes, the first is kept: the second output is ten times as large and leaves no mark."""
    model = Case("ddl").model()
    site = model.plan.sites[0]
    with record_routing(model) as record, torch.no_grad():
        runner = Runner(model.stream)
        flow = runner.open(model.embed(ids()))
        for scale in (1, 10):
            read = runner.read(flow, site, model.norm)
            runner.write(flow, site, read, scale * torch.ones(2, 9, 16, dtype=torch.float64))
    found = record[site.name].summary()
    assert found["output_rms"] == pytest.approx(1.0)
    assert sum(found["beta"]["counts"]) == 18


def test_record_counts_decoding_steps():
    model, cache = Case("attnres").model(), Cache()
    with record_routing(model) as record, torch.no_grad():
        for part in ids().split([4, 1, 4], 1):
            model(part, cache=cache)
    assert (record.forwards, record.tokens) == (3, 18)


def test_gradient_norm_is_that_of_autograd():
    model, outputs = Case("mudd").model(), []
    stream = model.stream
    context, state = model.context(ids()), stream.open(model.embed(ids()))
    for sublayer in model.sublayers():
        read = stream.read(state, sublayer.site, sublayer.norm)
        outputs.append(sublayer(*read.lanes, context=context))
        state = stream.write(state, sublayer.site, read, outputs[-1])
    (x,) = stream.read(state, model.plan.head, model.norm).lanes
    wanted = torch.autograd.grad(token_loss(x @ model.embed.weight.T, ids().roll(-1, 1)), outputs)
    with record_routing(model, gradients=True) as record:
        gradients(model, ids())
    for site, gradient, y in zip(model.plan.sites, wanted, outputs, strict=True):
        found = record[site.name].summary()
        assert found["gradient_norm"] == pytest.approx(gradient.norm().item())
        assert found["output_rms"] == pytest.approx(y.square().mean().sqrt().item())


def test_gradients_are_recorded_only_when_asked():
    model = Case("standard").model()
    with record_routing(model) as record:
        gradients(model, ids())
    assert all(site["gradient_norm"] is None for site in record.summary()["sites"])


def test_record_keeps_no_weights_when_told():
    model = Case("attnres").model()
    with record_routing(model, weights=False, similarity=False) as record:
        model(ids())
    assert record.weights() == {}
    head = record["head"].summary()["routing"]
    assert head["max_weight"] is not None
    assert "cosine" not in head


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("attnres", "distribution"),
        ("elc", "distribution"),
        ("attnres:total=true", "scaled"),
        ("delta:null=true", "scaled"),
        ("mhc", "scaled"),
        ("delta:centered=true", "signed"),
        ("denseformer", "signed"),
        ("mudd", "signed"),
    ],
)
def test_weights_that_are_no_distribution_are_called_so(spec, kind):
    model = Case(spec).model()
    with record_routing(model) as record:
        model(ids())
    found = [site for site in record.summary()["sites"] if len(site["sources"]) > 2][-1]
    assert found["routing"]["weights"] == kind
    shares = torch.tensor(found["routing"]["mean_shares"])
    torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)))
    weights = record[found["site"]].weights
    torch.testing.assert_close(torch.tensor(found["routing"]["mean_weights"]).double(), weights.mean((2, 3, 4)))
    assert found["routing"]["total_weight"] == pytest.approx(weights.sum(1).mean().item(), rel=1e-6)


def test_untrained_attnres_is_collapsed_everywhere():
    """Zero queries read the mean: entropy 1 at every site that is judged."""
    model = Case("attnres").model(moved=False)
    with record_routing(model) as record:
        model(ids())
    summary = record.summary()
    assert summary["network"]["collapsed_share"] == 1.0
    assert summary["network"]["collapsed_sites"] == ["l1_attn", "l1_mlp", "l2_attn", "l2_mlp", "head"]
    assert summary["network"]["normalised_entropy"] == pytest.approx(1.0)
    assert summary["network"]["effective_sources"] == pytest.approx((2 + 3 + 4 + 5 + 6 + 7) / 6)
    assert summary["deep_third"]["effective_sources"] == pytest.approx((5 + 6 + 7) / 3)
    assert summary["deep_third"]["judged_sites"] == 3


def test_static_weights_are_collapsed_by_their_favourite():
    model = Case("denseformer").model(moved=False)
    with record_routing(model) as record:
        model(ids())
    head = record["head"].summary()["routing"]
    assert (head["agreement"], head["favourite"], head["collapsed"]) == (1.0, "l2", True)
    assert head["normalised_entropy"] == pytest.approx(0.0)


def test_moved_attnres_routes_and_is_not_collapsed():
    model = Case("attnres").model()
    with record_routing(model) as record:
        model(ids())
    assert record.summary()["network"]["collapsed_share"] == 0.0


@pytest.mark.parametrize(("depth", "first"), [(3, 2), (12, 8), (4, 3), (1, 1)])
def test_deep_third_is_the_last_third_of_blocks_and_the_head(depth, first):
    plan = residua.Plan.regular(4, depth)
    assert [layer for layer in range(depth + 1) if in_deep_third(plan, layer)] == list(range(first, depth + 1))


def test_record_is_removed_when_the_forward_fails():
    model = Case("attnres").model()
    with pytest.raises(IndexError), record_routing(model):
        model(torch.tensor([[99]]))
    with record_routing(model) as record:
        model(ids())
    assert record.forwards == 1


def test_two_records_and_an_ablation_run_at_once():
    model = Case("attnres").model()
    with record_routing(model) as outer:
        model(ids())
        with record_routing(model) as inner:
            model(ids())
            ablated = ablate_sources(model, ids(), ids(), sites=["l1_attn"])
        model(ids())
    assert (outer.forwards, inner.forwards) == (7, 5)  # an ablation is a forward a source and one more
    assert len(ablated.change["l1_attn"]) == 3
    alone = ablate_sources(model, ids(), ids(), sites=["l1_attn"])
    assert ablated == alone


def test_a_deep_copy_is_another_model():
    model = Case("delta").model()
    with record_routing(model) as record:
        twin = copy.deepcopy(model)
        twin(ids())
        assert not record.forwards
        model(ids())
    assert record.forwards == 1
    assert torch.equal(twin(ids()), model(ids()))


@pytest.mark.parametrize("spec", ["attnres", "delta:blocks=2", "ddl", "mhc"])
@pytest.mark.parametrize("fp32_stream", [False, True])
def test_a_bfloat16_training_model_is_recorded(spec, fp32_stream):
    config = toy_config(design=spec, dtype="bfloat16", fp32_stream=fp32_stream)
    model = Transformer(config.model(24), seed=1)
    model.execution = execution(config)
    tokens = ids()
    with autocast(config, torch.device("cpu")):
        plain = model(tokens)
        with record_routing(model, gradients=True) as record:
            watched = model(tokens)
            token_loss(watched, tokens).backward()
    assert torch.equal(watched, plain)
    assert record.forwards == 1
    assert all(site["output_rms"] > 0 for site in record.summary()["sites"] if site["site"] != "head")


def test_compiled_models_run_uncompiled_while_they_are_recorded():
    model = Case("attnres").model()
    with record_routing(model) as expected:
        plain = model(ids())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(ids()), plain)
    for watched in (model, compiled):
        with record_routing(watched) as record:
            compiled(ids())
        assert_same(record.summary(), expected.summary())
    inplace = Case("attnres").model()
    inplace.blocks[0].compile(backend="eager")
    with torch.no_grad():
        assert_close(inplace(ids()), plain)
    with record_routing(inplace) as record:
        inplace(ids())
    assert_same(record.summary(), expected.summary())
    torch._dynamo.reset()


def test_model_without_a_stream_is_refused():
    with pytest.raises(ValueError, match="holds 0 residual streams"), record_routing(nn.Linear(2, 2)):
        pass


def test_empty_record_says_so():
    model = Case("attnres").model()
    with record_routing(model) as record:
        pass
    for ask in (record.summary, record.table, record.weights):
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            ask()
    with pytest.raises(KeyError, match="no site 'l9_attn'"):
        record["l9_attn"]


def test_nan_is_reported_and_still_json():
    model = Case("attnres").model()
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    with record_routing(model) as record:
        model(ids())
    summary = record.summary()
    json.dumps(summary, allow_nan=False)
    assert summary["sites"][-1]["routing"]["finite"] is False
    assert summary["network"]["max_weight"] is None


def test_table_has_a_line_a_site_and_the_numbers_of_the_summary():
    model = Case("delta:gate=scalar").model()
    with record_routing(model) as record:
        model(ids())
    text, summary = record.table(), record.summary()
    for site in summary["sites"]:
        (line,) = (line for line in text.splitlines() if line.split()[0] == site["site"])
        if "routing" in site:
            assert f"{site['routing']['max_weight']:.3f}" in line
    assert f"{summary['deep_third']['max_weight']:.3f}" in next(
        x for x in text.splitlines() if x.startswith("last third")
    )
    plain = Case("standard").model()
    with record_routing(plain) as record:
        plain(ids())
    assert "no site mixes sources" in record.table()
