"""Every design on Llama: how it enters, that it learns, and that it decodes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import residua
from residua.hf.convert import convert
from residua.testing import error
from tests.hf.models import base, converted, ids

ENTERING = tuple(name for name in residua.names() if residua.design(name).conversion.refusal is None)
EXACT = (
    "standard", "denseformer", "denseformer:dilation=2", "mudd", "mudd:prepost=all", "delta", "delta:blocks=2",
    "delta:value_lane=true", "delta:null=true", "delta:centered=true", "delta_released", "ddl",
    "ddl:channels=2,compress=token", "ddl:channels=2,expand=conv", "ddl:channels=4,compress=channel_same", "depthswa",
    "depthswa:sources=deltas,window=2", "lambdas", "lambdas:each=sublayer,smear=true", "frac", "frac:dynamic=false",
    "laurel", "laurel:weights=free",
    "highway", "highway:form=rezero",
)  # fmt: skip
CLOSE = ("dca", "dca:grn=v1", "attnres", "attnres:blocks=2", "attnres:heads=2", "attnres:window=1")
UP_TO_EPS = (
    "hyper", "hyper:streams=2", "mhc", "mhc:head=learned,reads=previous", "altup", "lr_attnres", "lr_attnres:blocks=2",
)  # fmt: skip


def gap(model, plain):
    with torch.no_grad():
        before, after = plain(ids()).logits, model(ids()).logits
    return ((after - before).abs().max() / before.square().mean().sqrt()).item()


@pytest.mark.parametrize("design", EXACT)
def test_design_with_a_zero_gate_changes_no_bit(design):
    model = converted("llama", design)
    assert gap(model, base("llama")) == 0
    assert model.config.identity["same"]
    assert model.config.identity["bound"] == 0


@pytest.mark.parametrize("design", CLOSE)
def test_design_that_sums_anew_is_within_the_bound(design):
    model = converted("llama", design)
    assert gap(model, base("llama")) <= 1e-5
    assert model.config.identity["bound"] == 1e-5


@pytest.mark.parametrize("design", UP_TO_EPS)
def test_design_that_scales_the_stream_is_within_what_eps_explains(design):
    """The gap falls with the eps of the norms, as its row says; with a hundredth of it, to a hundredth."""
    model = converted("llama", design)
    assert gap(model, base("llama")) <= model.config.identity["bound"] < 1e-2
    small = converted("llama", design, rms_norm_eps=1e-12)
    assert gap(small, base("llama", rms_norm_eps=1e-12)) <= 1e-5


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ("elc", "train it from scratch"),
        ("vertical", "train it from scratch"),
        ("gated", "train it from scratch"),
        ("mhc:model=deepseek-v4", "does not start as the base network.*leave out eps"),
        ("mhc:init=hy-v4", "leave out init"),
        ("multigate", "train it from scratch"),
        ("lambdas:skips=unet", "does not start as the base network.*leave out skips"),
        ("postnorm:form=keel", "train it from scratch"),
        ("highway:form=beam", "does not start as the base network.*leave out form"),
        ("highway:start=0.5", "leave out start, which is 1.0 in a conversion"),
        ("delta:gate=none,blocks=2", "leave out gate, which is alpha in a conversion"),
        ("attnres:sources=states", "does not start as the base network.*leave out sources"),
        ("ddl:start=paper", "leave out start, which is standard"),
        ("nosuch", "unknown design"),
        ("delta:gates=alpha", "did you mean 'gate'"),
    ],
)
def test_design_that_is_not_the_base_is_refused(design, said):
    model = base("llama")
    with pytest.raises((ValueError, TypeError), match=said):
        convert(model, design, say=None)
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("layout", [None, "canon,attn,mlp"])
def test_failed_check_leaves_the_model_as_it_was(layout):
    """OLMo 2 has no norm before a sublayer to forget a scale: a design that scales what it reads is refused there."""
    model, plain = base("olmo2"), base("olmo2")
    with pytest.raises(ValueError, match="not the base network"):
        convert(model, "mhc", layout=layout, say=None)
    assert type(model) is type(plain)
    assert str(model) == str(plain)
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, plain(ids()).logits)
    assert gap(convert(model, "mudd", say=None), plain) == 0


@pytest.mark.parametrize("design", ENTERING)
def test_routing_parameters_learn_from_the_start(design):
    model = converted("llama", design).train()
    start = {name: each.detach().clone() for name, each in model.named_parameters() if ".stream." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, each in model.named_parameters():
        assert name not in start or not torch.equal(each, start[name]), f"{name} has not moved"


@pytest.mark.parametrize("design", [*ENTERING, "ddl:channels=2,expand=conv", "delta:value_lane=true"])
def test_decoding_saving_and_beams_hold(design, tmp_path):
    model = converted("llama", design, moved=True)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids(), **greedy)
    assert torch.equal(model.generate(ids(), use_cache=False, **greedy), plain)
    beams = model.generate(ids(), num_beams=3, **greedy)
    assert torch.equal(model.generate(ids(), num_beams=3, use_cache=False, **greedy), beams)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.stream == model.config.stream
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    with torch.no_grad():  # a file's tensors are aligned otherwise in memory, which moves the last bit of a product
        assert error(again(ids()).logits, model(ids()).logits) < 2e-6


@pytest.mark.parametrize("design", ENTERING)
def test_hidden_states_are_what_blocks_and_head_read(design):
    """Entry i is the raw first lane of block i, and the last is the normed read of the head."""
    model = converted("llama", design, moved=True)
    seen, stream = [], model.model.stream
    inner = stream.read

    def read(state, site, norm):
        def watched(*lanes):
            if site.first:
                seen.append(lanes[0])
            return norm(*lanes)

        found = inner(state, site, watched)
        if site.kind == "head":
            seen[-1] = found.lanes[0]
        return found

    stream.read = read
    with torch.no_grad():
        hidden = model(ids(), output_hidden_states=True).hidden_states
    assert len(hidden) == len(seen) == 3
    assert all(map(torch.equal, hidden, seen))


def test_hidden_states_are_recorded_under_checkpointing():
    model = converted("llama", "mudd", moved=True).train()
    plain = model(ids(), use_cache=False, output_hidden_states=True).hidden_states
    model.gradient_checkpointing_enable()
    again = model(ids(), use_cache=False, output_hidden_states=True).hidden_states
    assert len(plain) == len(again) == 3
    assert all(map(torch.equal, plain, again))


def test_two_forwards_before_a_backward_keep_apart():
    model = converted("llama", "attnres:blocks=2", moved=True).train()

    def gradients():
        model.zero_grad()
        (model(ids(), labels=ids()).loss + model(ids(seed=1), labels=ids(seed=1)).loss).backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(each, plain[name]) for name, each in gradients().items())


def test_chosen_hidden_states_are_those_of_the_base():
    for chosen in ([0], [1], [0, 1]):
        with torch.no_grad():
            before, after = (
                each(ids(), output_hidden_states=chosen).hidden_states
                for each in (base("llama"), converted("llama", "standard"))
            )
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def test_attentions_can_still_be_recorded():
    model = converted("llama", "delta")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert len(model(ids(), output_attentions=True).attentions) == 2


def test_random_start_is_seeded():
    first, second = (converted("llama", "delta").state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = convert(base("llama"), "delta", seed=1, say=None).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_conversion_says_what_it_did():
    said = []
    convert(base("llama"), "delta:blocks=2", say=said.append)
    assert said[0] == "llama -> delta:blocks=2,gate=alpha"
    assert said[1].startswith("identity: max |logit difference| / rms 0, bound 0")


def test_copy_of_a_converted_model_is_its_own():
    import copy

    model = converted("llama", "delta:value_lane=true", moved=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.stream.at["l1_attn"][0].gate.alpha.add_(3.0)
        assert error(other(ids()).logits, model(ids()).logits) > 1e-4


def test_converted_model_is_not_converted_twice():
    with pytest.raises(ValueError, match="converted already"):
        convert(converted("llama", "delta"), "mudd", say=None)


def test_routing_of_a_converted_model_can_be_recorded():
    from residua.lab.diagnose import record_routing

    model = converted("llama", "delta:blocks=2", moved=True)
    with torch.no_grad(), record_routing(model) as record:
        model(ids())
    assert record.design == model.model.stream.spec
    assert set(record.weights()) == {
        site.name for site in model.model.stream.plan.readers if model.model.stream.sources(site)
    }


def test_designs_of_the_registry_are_all_tried():
    assert {spec.partition(":")[0] for spec in (*EXACT, *CLOSE, *UP_TO_EPS)} == set(ENTERING)
