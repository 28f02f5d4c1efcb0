"""The finder finds what is written down, says what it found where it is wrong, and changes nothing."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from residua.hf.anatomy import ANATOMY, Block, Fused, Part, from_json, to_json
from residua.hf.convert import convert
from residua.hf.find import find
from residua.hf.program import FUNCTIONS, Frame, Program
from residua.hf.proof import replay, same, units
from residua.testing import error
from tests.hf.models import base, ids
from tests.hf.types import model_of


def written(architecture, model):
    """The row of an architecture, as precise as the finder is."""
    row = ANATOMY[architecture].of(model.config)
    if architecture == "gpt2":  # which keeps the keywords of cross-attention from its attention
        line = (
            "attn(lanes, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache, **rest)"
        )
        (block,) = row.blocks
        parts = (replace(block.parts[0], text=line), block.parts[1])
        row = replace(row, blocks=(replace(block, parts=parts),))
    return row


@pytest.mark.parametrize("architecture", ANATOMY)
def test_finder_finds_every_row(architecture):
    model = base(architecture)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    text = str(model)
    found = find(model)
    assert found == written(architecture, model)
    assert from_json(to_json(found)) == found
    assert str(model) == text
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_both_forms_of_gpt_neox_are_found():
    model = base("gpt_neox", use_parallel_residual=False)
    assert find(model) == ANATOMY["gpt_neox"].of(model.config)
    assert len(find(model).parts) == 2


def test_half_precision_is_found_in_float32_and_stays_half():
    model = base("granite").to(torch.bfloat16)
    assert find(model) == ANATOMY["granite"].of(model.config)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def layer_of(model):
    layer = model.model.layers[0]
    state = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        positions = torch.arange(5)[None].expand(2, -1)
        rotary = model.model.rotary_emb(state, positions)
    return layer, state, {"position_embeddings": rotary, "attention_mask": None}


WRONG = {
    "no norm": Block((Part("attn", "self_attn"), Part("mlp", "mlp", "post_attention_layernorm"))),
    "the other norm": Block((Part("attn", "self_attn", "input_layernorm"), Part("mlp", "mlp", "input_layernorm"))),
    "a factor": Block(
        (
            Part("attn", "self_attn", "input_layernorm"),
            Part("mlp", "mlp", "post_attention_layernorm", text="mlp(x) * 1.001"),
        )
    ),
    "in parallel": Block((Part("attn", "self_attn", "input_layernorm", text="self_attn(lanes, **kwargs) + mlp(x)"),)),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_anatomy_does_not_hold(how):
    layer, state, keywords = layer_of(base("llama"))
    with torch.no_grad():
        right = ANATOMY["llama"].blocks[0]
        assert same(right, layer, layer.forward, state, keywords).exact
        assert torch.equal(replay(right, layer, state, keywords)[0], layer(state, **keywords))
        proof = same(WRONG[how], layer, layer.forward, state, keywords)
    assert not proof.holds
    said = proof.error("llama", 0, WRONG[how])
    assert "\n" not in said
    assert "the state that the layer returns differs by" in said
    assert "self_attn(lanes, **kwargs)" in said


def test_layer_that_does_what_no_line_says_is_refused():
    model = model_of("arcee")
    layer = type(model.model.layers[0])

    class Turning(layer):
        def forward(self, hidden_states, **kwargs):
            made = super().forward(hidden_states, **kwargs)
            return made.flip(0).flip(0)  # the same, and no line has such a thing

    for each in model.model.layers:
        each.__class__ = Turning
    text, keys = str(model), set(model.state_dict())
    with pytest.raises(ValueError, match="in layer 0, between its modules the layer calls flip"):
        convert(model, "delta", say=None)
    assert str(model) == text
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("place", [0, 1])
def test_error_names_the_first_tensor_that_differs(place):
    """A layer that does something else with a single token: what was read from a prompt is proved in decoding too,
    of the first layer of its kind and of the next, which is not read again."""
    model = model_of("arcee")
    layer = type(model.model.layers[0])

    class Fickle(layer):
        def forward(self, hidden_states, **kwargs):
            hidden_states = super().forward(hidden_states, **kwargs)
            once_more = id(self) == fickle and hidden_states.shape[1] == 1
            return hidden_states + self.mlp(hidden_states) if once_more else hidden_states

    fickle = id(model.model.layers[place])  # which no setting of the layer shows
    for each in model.model.layers:  # of one kind
        each.__class__ = Fickle
    with pytest.raises(
        ValueError, match=rf"layer {place}: the state that the layer returns differs by .* Found: attn: x = input"
    ) as told:
        find(model)
    assert "\n" not in str(told.value)
    layer, state, keywords = layer_of(base("llama"))
    with torch.no_grad():
        right = ANATOMY["llama"].blocks[0]
        sites = []
        replay(right, layer, state, keywords, sites)
        proof = same(WRONG["a factor"], layer, layer.forward, state, keywords, sites)
    assert proof.where == "the stream after site 1 (mlp, mlp)"


def test_units_in_the_last_place():
    one = torch.tensor([1.0, 4.0])
    assert units(one, one.clone()) == 0
    assert units(one + torch.tensor([0.0, 4 * 2**-23]), one) == pytest.approx(1)
    assert units(one * float("nan"), one) == float("inf")
    assert units(None, one) == float("inf")


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.double, self.pair = nn.Linear(4, 4, bias=False), Pair()
        self.factor = 3.0


class Pair(nn.Module):
    def forward(self, x, shift=0.0, **more):
        return x + shift, x - len(more)


def run(text, **keywords):
    x = torch.ones(2, 4)
    frame = Frame(Toy(), {"x": x, "raw": 2 * x, "lanes": x}, keywords, {"shift": 0.5, "mask": None})
    return Program(text)(frame)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x * self.factor - raw / 4", 2.5),
        ("pair(x)[1]", 1.0),
        ("pair(x) + raw", 3.0),
        ("pair(x, shift=shift)[0]", 1.5),
        ("pair(x, **kwargs)[0]", 3.0),
        ("pair(x, **rest)[1]", 0.0),
        ("y = pair(x); y[0] + y[1]", 2.0),
        ("torch.like(torch.flat(x), raw) + zero", 1.0),
        ("-x", -1.0),
    ],
)
def test_lines_mean_what_they_say(text, value):
    keywords = {"shift": 2.0, "other": 1} if "**" in text else {}
    made = run(text, **keywords)
    made = made[0] if isinstance(made, tuple) else made
    assert torch.equal(made, torch.full((2, 4), value))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "self.__class__", "torch.load(x)", "(lambda: x)()", "x if raw else x", "[x]",
        "x @ raw", "f'{x}'", "import os", "y = x", "", "open('a', **x)", "x[raw]", "x.data.__class__",
    ],
)  # fmt: skip
def test_lines_are_no_code(text):
    """What a config brings from elsewhere is read, and what is not of the few forms is refused, or names nothing."""
    with pytest.raises((ValueError, KeyError), match=r"^[^\n]*$"):
        Program(text)(Frame(Toy(), {"x": torch.ones(1), "raw": torch.ones(1)}, {}, {}))


def test_functions_of_lines_are_all_used():
    assert set(FUNCTIONS) == {"dropout", "tanh", "sigmoid", "flat", "like"}


def test_config_without_its_anatomy_is_refused(tmp_path):
    import json

    from transformers import AutoModelForCausalLM

    convert(model_of("arcee"), "delta", say=None).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["anatomy"]["blocks"][0]["parts"][0]["norm"] == "input_layernorm"
    file.write_text(json.dumps(config | {"anatomy": None}))
    with pytest.raises(ValueError, match="has no anatomy"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_text(json.dumps(config | {"anatomy": {"blocks": 3}}))
    with pytest.raises(ValueError, match="cannot be read"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loading_searches_nothing(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from residua.hf import find as finding

    model = convert(model_of("arcee"), "mudd", say=None)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(finding, "find", None)
    monkeypatch.setattr(finding, "locate", None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert error(again(ids()).logits, model(ids()).logits) < 2e-6


def test_dropout_between_modules_drops_in_training_alone():
    """OPT drops what a sublayer made without a module for it: the line does the same, and not in evaluation."""
    model = convert(model_of("opt"), "standard", say=None)
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, model(ids()).logits)
        model.train()
        torch.manual_seed(0)
        one = model(ids()).logits
        plain = model_of("opt").train()
        torch.manual_seed(0)
        assert torch.equal(plain(ids()).logits, one)
        assert not torch.equal(model(ids()).logits, one)


def test_fused_layouts_are_told_apart():
    grouped, once = (find(base(each)).projections for each in ("gpt_neox", "phi3"))
    assert grouped == Fused("query_key_value", (8, 8, 8), 4)
    assert once == Fused("qkv_proj", (32, 16, 16), 1)


def test_design_that_needs_lanes_is_refused_by_name_and_others_work():
    model = model_of("mamba")
    text = str(model)
    with pytest.raises(ValueError, match=r"^mudd\S* gives q, k and v inputs of their own, and no attention of mamba"):
        convert(model, "mudd", say=None)
    assert str(model) == text
    with pytest.raises(ValueError, match="shares values of attention"):
        convert(copy.deepcopy(model), "standard:value=zero_table", say=None)
    assert convert(model, "delta", say=None).config.identity["bound"] == 0


def test_what_is_found_is_said():
    said = []
    convert(model_of("cohere"), "delta", say=said.append)
    assert said[0].startswith("anatomy of cohere, found and proved: attn: x = input_layernorm(raw), raw + self_attn(")
    assert any("bound 1e-05" in line for line in said)


def test_layers_of_one_kind_are_widened_once_and_each_is_proved(monkeypatch):
    from residua.hf import find as finding

    wide, maps = [], []
    model = base("granite", num_hidden_layers=4).to(torch.bfloat16)

    def named():
        return [name for name, each in model.named_parameters() if each.dtype == torch.float32]

    def counted(block, layer, *rest):
        wide.append(sorted(named()))
        return same(block, layer, *rest)

    monkeypatch.setattr(finding, "same", counted)
    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            each.register_forward_hook(lambda *_: maps.append(len([name for name in named() if "proj" in name])))
    assert find(model) == ANATOMY["granite"].of(model.config)
    norms = [f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")]
    assert wide == [norms, [], [], []] * 3  # padded, whole, and a token after it
    assert max(maps) == 1  # one linear map of the layer at a time


def test_layer_that_differs_by_its_number_alone_is_read_by_itself():
    """Its modules do not show it: the proof does, and the layer is read in float32 as the first of its kind was."""
    model = model_of("arcee")
    layer = type(model.model.layers[0])

    class Counting(layer):
        def forward(self, hidden_states, **kwargs):
            hidden_states = super().forward(hidden_states, **kwargs)
            return hidden_states + self.mlp(hidden_states) if self.self_attn.layer_idx else hidden_states

    for each in model.model.layers:
        each.__class__ = Counting
    found = find(model.to(torch.bfloat16))
    assert [len(block.parts) for block in found.blocks] == [2, 3]
    assert found.order == (0, 1)


@pytest.mark.parametrize("name", ["longcat_flash", "mamba2", "glm_moe_dsa"])
def test_finder_is_quick(name):
    """Those that take longest of all types."""
    model = model_of(name)
    begun = time.process_time()
    find(model)
    assert time.process_time() - begun < 5


def test_attention_that_cannot_be_called_alone_has_no_lanes_to_find():
    from residua.hf.projections import projections

    class Alone(nn.Module):
        def forward(self, x, past_key_values=None):
            return past_key_values.update(x)

    x = torch.ones(2, 6, 32)
    assert projections(Alone(), (x,), {}, x, None) == (None, ())


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (MemoryError("no memory"), (MemoryError, "^no memory$")),
        (OSError("disk"), (OSError, "^disk$")),
        (ZeroDivisionError("of ours"), (ValueError, "looking at layer 0 ended in ZeroDivisionError: of ours")),
    ],
)
def test_errors_of_the_finder_are_told_as_what_they_are(monkeypatch, raised, seen):
    from residua.hf import find as finding

    def broken(*_):
        raise raised

    monkeypatch.setattr(finding, "projections", broken)
    model = model_of("arcee")
    with pytest.raises(seen[0], match=seen[1]) as told:
        find(model)
    assert (told.value if isinstance(raised, MemoryError | OSError) else told.value.__cause__) is raised
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("raised", [MemoryError, KeyError])
def test_model_that_does_not_run_is_told_from_a_machine_that_cannot(monkeypatch, raised):
    model = model_of("arcee")
    monkeypatch.setattr(model.model.norm, "forward", lambda *_: (_ for _ in ()).throw(raised("why")))
    with pytest.raises(MemoryError if raised is MemoryError else ValueError, match="why"):
        find(model)
