"""`residua inspect`, `eval`, `generate`, `finetune` and `cost` on the directory of a released model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import residua
from residua.cli import app
from residua.hf.released.rows import ROWS
from residua.lab.cost.targets import from_hugging_face
from residua.lab.finetune import MODEL, FinetuneConfig, finetune
from residua.plan import Plan
from tests.hf.released_models import LAYERS, MADE, STREAM, WIDTH, released
from tests.train.harness import toy_tokens

SMALL = ("--width", "8", "--depth", "1")
VOCAB = 260
"""Bytes, and their end."""


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.fixture(scope="module", params=MADE)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("released") / request.param
    released(request.param, vocab=VOCAB).save_pretrained(made)
    return made


def design(folder):
    config = released(folder.name, vocab=VOCAB).config.get_text_config()
    return residua.build(ROWS[folder.name].design(config), Plan.regular(WIDTH, LAYERS)).spec


def test_inspect_draws_a_released_model(folder, tmp_path):
    page = tmp_path / "page.html"
    found = json.loads(invoke("inspect", folder, "--prompt", "Hello", "--json", "--html", page))
    assert found["design"] == design(folder)
    assert len(found["weights"]) >= LAYERS
    assert found["loss"] is not None
    assert "stream1" in page.read_text()


def test_generate_continues_with_a_released_model(folder):
    flags = ("--prompt", "Hello", "-n", "5", "--json")
    first, again = (json.loads(invoke("generate", folder, *flags, "--seed", "1")) for _ in range(2))
    assert first == again
    greedy = json.loads(invoke("generate", folder, *flags, "--temperature", "0"))["tokens"]
    model = released(folder.name, vocab=VOCAB)
    ids = torch.tensor([list(b"Hello")])
    theirs = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=256, pad_token_id=0)
    assert greedy == [int(token) for token in theirs[0, 5:] if token != 256]


def test_eval_measures_a_released_model(folder, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Text {number}. " + "word " * 40)
    found = json.loads(invoke("eval", folder, "--corpus", f"dir:{text}", "--context", "16", "--windows", "2", "--json"))
    assert found["design"] == design(folder)
    assert found["loss"]["loss"] > 0


def test_finetune_trains_a_released_model_and_keeps_its_keys(folder, tmp_path):
    config = FinetuneConfig(
        checkpoint=str(folder), steps=2, batch=2, context=8, eval_every=2, eval_windows=2, save_every=2, freeze=True,
        weight_decay=0.1,
    )  # fmt: skip
    result = finetune(config, tmp_path / "run", tokens=toy_tokens())
    assert result.design == design(folder)
    files = [each / "model.safetensors" for each in (folder, tmp_path / "run" / MODEL)]
    assert load_file(files[0]).keys() == load_file(files[1]).keys()
    own = type(released(folder.name, vocab=VOCAB))
    before, after = (own.from_pretrained(file.parent, dtype=torch.float32).state_dict() for file in files)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == {key for key in before if any(each in key for each in STREAM)}


def test_cost_counts_the_design_of_a_released_model(folder):
    found = json.loads(invoke("cost", "--config", folder, "--tokens", "16", "--json"))["designs"]
    own = found[design(folder)]["predicted"]
    model = released(folder.name, vocab=VOCAB)
    named = dict(model.named_parameters())
    assert own["parameters"] == sum(each.numel() for each in named.values())
    assert own["stream_flops"] > 0
    assert own["flops"] is None
    assert found["standard"]["predicted"]["parameters"] < own["parameters"]
    assert "-" in invoke("cost", "--config", folder, "--tokens", "16")


def test_cost_of_a_released_model_is_of_its_design_alone(folder):
    for flags in (["--sweep", "T=8:16"], ["--measure"]):
        done = CliRunner().invoke(app, ["cost", "--config", str(folder), *flags])
        assert isinstance(done.exception, ValueError)
        assert "only the design is counted" in str(done.exception)
    with pytest.raises(ValueError, match="has its own sublayers"):
        from_hugging_face(folder, layout="swa,attn,mlp")


def test_presets_are_what_the_configurations_say():
    """The classes' default configurations, which are those of the published checkpoints."""
    from transformers import AutoConfig

    for kind, row in ROWS.items():
        config = AutoConfig.for_model(kind).get_text_config()
        plan = Plan.regular(64, 1)
        named = [
            spec
            for each in residua.names()
            for title, spec in residua.design(each).released_in.items()
            if title == row.title
        ]
        assert [residua.build(spec, plan).spec for spec in named] == [residua.build(row.design(config), plan).spec], (
            kind
        )


def test_designs_say_which_released_model_they_are_from():
    rows = json.loads(invoke("designs", "--json", *SMALL))
    found = {model for row in rows for model in row["released"]}
    assert {row.title for row in ROWS.values()} | {"Kimi K3", "DeepSeek-V4.1"} <= found
    assert "mhc:model=deepseek-v4 in DeepSeek-V4;" in invoke("designs", *SMALL).replace("\n", " ")
    assert "mhc:model=hy-v4" in invoke("designs", "mhc", *SMALL)
