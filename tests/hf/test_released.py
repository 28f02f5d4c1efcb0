"""Released models on our stream: their logits, their keys, and what our tools see of them."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from residua import ablate_sources, open_released, record_routing
from residua.hf.released.loans import lenders
from residua.hf.released.rows import ROWS
from residua.lab.diagnose.record import find_stream
from tests.hf.released_models import LAYERS, MADE, STREAM, VOCAB, logits, precise, released

IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(5))
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}
"""max |difference of a logit| / RMS of the logits."""

kinds = pytest.mark.parametrize("kind", MADE)


def gap(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.square().mean().sqrt()).item()


@kinds
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_released_logits_are_theirs(kind, dtype):
    model = released(kind, dtype)
    with precise(dtype):
        theirs = logits(model, IDS)
        ours = logits(open_released(model), IDS)
    for name, expected in theirs.items():
        assert gap(ours[name], expected) < BOUND[dtype], name


@kinds
def test_released_model_in_half_precision_is_as_near_to_float32_as_theirs(kind):
    half = released(kind, torch.bfloat16)
    with torch.no_grad():
        exact, theirs = (
            each(input_ids=IDS, use_cache=False).logits.float() for each in (copy.deepcopy(half).float(), half)
        )
        ours = open_released(half)(input_ids=IDS, use_cache=False).logits.float()
    # The median over tokens: a rounding that turns a choice of experts moves one token by much, theirs or ours.
    far = [(each - exact).square().mean(-1).sqrt().median() for each in (ours, theirs)]
    assert far[0] < 1.3 * far[1]


@kinds
def test_released_logits_depend_on_every_stream_parameter(kind):
    """Half of each parameter at a time: what the mapping left out or put elsewhere would not move the same logits."""
    model = open_released(released(kind, torch.float64))
    plain = released(kind, torch.float64)
    ids = IDS[:1, :5]
    parameters = dict(plain.named_parameters())
    with precise(torch.float64), torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(each in name for each in STREAM):
                continue
            for changed in (parameter, parameters[name]):
                changed.flatten()[: -(-changed.numel() // 2)].mul_(1.5)
            ours, theirs = (each(input_ids=ids, use_cache=False).logits for each in (model, plain))
            assert gap(ours, theirs) < BOUND[torch.float64], name
    assert torch.equal(*(each.state_dict()[name] for each in (model, plain)))


@kinds
def test_released_gradients_are_theirs(kind):
    plain, model = released(kind, torch.float64), open_released(released(kind, torch.float64))
    with precise(torch.float64):
        for each in (plain, model):
            each(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if any(each in name for each in STREAM):
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-7, atol=1e-12, msg=name)


@kinds
def test_released_model_saves_what_it_was_loaded_from(kind, tmp_path):
    plain = released(kind)
    plain.save_pretrained(tmp_path / "first")
    type(plain).from_pretrained(tmp_path / "first", dtype="auto").save_pretrained(tmp_path / "theirs")
    model = open_released(tmp_path / "first")
    assert type(model) is type(plain)
    model.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@kinds
def test_released_model_keeps_its_parameters_and_the_stream_has_none(kind):
    model = released(kind)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    stream = find_stream(open_released(model))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not list(stream.parameters())
    lent = {id(parameter) for lender in lenders(stream) for parameter in lender.parameters()}
    assert lent == {before[name] for name in before if any(each in name for each in STREAM)}


@kinds
def test_released_model_is_recorded_and_ablated(kind):
    model = open_released(released(kind))
    with torch.no_grad(), record_routing(model) as record:
        model(input_ids=IDS, use_cache=False)
    assert record.forwards == 1
    assert record.tokens == IDS.numel()
    stream = find_stream(model)
    sites = [site.name for site in stream.plan.readers if stream.sources(site)]
    assert len(sites) >= LAYERS
    assert list(record.weights()) == sites
    assert record["head"].summary()["stream_rms"] > 0
    for site in sites:
        assert record[site].weights.shape[1] == len(stream.sources(stream.plan.site(site)))
    found = ablate_sources(model, IDS[:, :-1], IDS[:, 1:], sites=["l1_attn"], use_cache=False)
    assert any(abs(change) > 1e-4 for change in found.change["l1_attn"].values())


@kinds
def test_released_copies_are_apart(kind):
    model = open_released(released(kind))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert gap(logits(model, IDS)["prefill"], logits(released(kind), IDS)["prefill"]) < BOUND[torch.float32]


@kinds
def test_released_hidden_states_and_checkpointing_are_theirs(kind):
    plain, model = released(kind), open_released(released(kind))
    theirs, ours = (
        each(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states for each in (plain, model)
    )
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    assert all(gap(each, expected) < BOUND[torch.float32] for each, expected in zip(ours, theirs, strict=True))
    model.gradient_checkpointing_enable()
    model.train()
    with record_routing(model) as record:
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert record.forwards == 1
    assert all(
        parameter.grad is not None for lender in lenders(find_stream(model)) for parameter in lender.parameters()
    )


@kinds
def test_released_generation_is_theirs(kind):
    given = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": VOCAB + 1, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    ids = IDS.masked_fill(mask == 0, 0)
    theirs, ours = (
        each.generate(input_ids=ids, attention_mask=mask, **given)
        for each in (released(kind), open_released(released(kind)))
    )
    assert torch.equal(theirs, ours)


@kinds
def test_released_layers_may_be_offloaded(kind, tmp_path):
    """A layer and what stands behind the layers live on disk, and are brought in as they run."""
    plain = released(kind)
    plain.save_pretrained(tmp_path)
    backbone = next(name for name, module in plain.named_modules() if hasattr(module, "layers"))
    named = dict(plain.named_modules())
    above = ["", *(backbone.rsplit(".", up)[0] for up in range(backbone.count(".") + 1))]
    spread = {f"{path}.{name}".lstrip("."): "cpu" for path in above for name, _ in named[path].named_children()}
    places = {name: where for name, where in spread.items() if name not in (*above, f"{backbone}.layers")}
    places |= {f"{backbone}.layers.{layer}": "cpu" for layer in range(len(named[backbone].layers))}
    for name in ("layers.1", "hc_head", "hyper_connection_mixer", "altup_unembed_projections", "norm"):
        if f"{backbone}.{name}" in named:
            places[f"{backbone}.{name}"] = "disk"
    model = open_released(tmp_path, device_map=places, offload_folder=str(tmp_path / "off"))
    stream = find_stream(model)
    assert any(parameter.device.type == "meta" for lender in lenders(stream) for parameter in lender.parameters())
    with torch.no_grad(), record_routing(model) as record:
        ours = model(input_ids=IDS, use_cache=False).logits
        assert gap(ours, plain(input_ids=IDS, use_cache=False).logits) < BOUND[torch.float32]
    assert record.forwards == 1


def test_released_model_compiles_to_one_graph():
    """Gemma 3n does so by itself; the others choose experts by what they compute."""
    model = open_released(released("gemma3n"))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS, use_cache=False).logits
        assert gap(compiled, model(input_ids=IDS, use_cache=False).logits) < BOUND[torch.float32]


def test_a_class_that_transformers_lacks_is_named(tmp_path, monkeypatch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    (tmp_path / "config.json").write_text('{"model_type": "hy_v4"}')
    monkeypatch.setattr(type(CONFIG_MAPPING), "__contains__", lambda self, key: key != "hy_v4")
    with pytest.raises(ValueError, match="has no class for hy_v4; install a newer release"):
        open_released(tmp_path)


def test_opened_twice_or_unknown_is_refused():
    model = open_released(released("deepseek_v4"))
    with pytest.raises(ValueError, match="on a stream of residua already"):
        open_released(model)
    from tests.hf.models import base

    with pytest.raises(ValueError, match=r"no released stream is known for model type 'llama'.*residua convert"):
        open_released(base("llama"))


def test_every_row_is_tested():
    assert {kind.removesuffix("_text") for kind in ROWS} == set(MADE)
