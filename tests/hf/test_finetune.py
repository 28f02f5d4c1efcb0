"""A Hugging Face checkpoint in our loop: same start, two rates, resume to the last bit, a directory at the end."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from residua.cli import app
from residua.hf.convert import convert
from residua.lab.evaluate.opened import open_model, open_start
from residua.lab.finetune import MODEL, FinetuneConfig, finetune, group_of, is_added
from residua.lab.train import Diverged, read_metrics
from tests.hf.models import converted
from tests.train.harness import VOCAB, Stop, final_files, stop_after, toy_tokens, untimed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama, saved as Hugging Face saves one."""
    return saved_base(tmp_path_factory.mktemp("base"), VOCAB)


def saved_base(folder, vocab):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def settings(checkpoint, /, **changes):
    given = {
        "checkpoint": checkpoint, "design": "delta:blocks=2", "steps": 6, "batch": 4, "context": 12, "lr": 1e-3,
        "residual_lr": 1e-2, "eval_every": 3, "eval_windows": 8, "save_every": 2, "seed": 3,
    }  # fmt: skip
    return FinetuneConfig(**(given | changes))


def run(checkpoint, out, on_event=None, **changes):
    return finetune(settings(checkpoint, **changes), out, tokens=toy_tokens(), on_event=on_event)


def test_finetune_starts_at_the_loss_of_the_base(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "converted")
    run(checkpoint, tmp_path / "base", design=None)
    first = [next(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("converted", "base")]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], abs=1e-5)
    assert first[0]["routing"]["network"]["max_weight"] > 0
    assert "routing" not in first[1]


def test_finetune_leaves_a_directory_that_from_pretrained_loads(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path / "run")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / MODEL, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.stream["name"] == "delta"
    assert result.design == "delta:blocks=2,gate=alpha"
    ids = torch.from_numpy(toy_tokens().valid[:13].astype("int64"))[None]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])
    assert math.isfinite(float(loss))


@pytest.mark.parametrize("design", ["delta:blocks=2", None])
def test_a_run_can_be_set_beside_what_it_started_from(tmp_path, design):
    """Before: the checkpoint, converted as the run converted it. After: the directory that it left."""
    checkpoint = saved_base(tmp_path / "base", 260)  # room for bytes
    given = str(tmp_path / "converted")
    if design is None:
        convert(checkpoint, "delta:blocks=2").save_pretrained(given)
    run(given if design is None else checkpoint, tmp_path / "run", design=design)
    before, after = open_start(tmp_path / "run"), open_model(tmp_path / "run")
    windows = torch.from_numpy(toy_tokens().valid[:13].astype("int64"))[None]
    assert before.design == after.design
    assert before.tokenizer.name == after.tokenizer.name == "bytes"
    start = AutoModelForCausalLM.from_pretrained(given if design is None else checkpoint)
    with torch.no_grad():
        assert torch.allclose(start(windows).logits, before.logits(windows), atol=1e-4)
        assert not torch.allclose(after.logits(windows), before.logits(windows), atol=1e-2)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--before", "--prompt", "\x01\x02\x03"])
    assert done.exit_code == 0, done.exception
    assert f"{tmp_path / 'run'} minus {tmp_path / 'run'}, before" in done.output
    both = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--before", "--json", "--prompt", "\x01\x02\x03"])
    assert len(json.loads(both.stdout)) == 2
    with pytest.raises(ValueError, match=r"the model that it left is .*run.model"):
        convert(str(tmp_path / "run"), "mudd")
    with pytest.raises(ValueError, match="does not say what it started from"):
        open_start(checkpoint)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": 65, "checkpoint": "gpt2"}, "takes 64 tokens at most"),
        ({"design": "elc"}, "train it from scratch"),
        ({"design": "mudd", "checkpoint": "llama"}, "converted already, to delta"),
    ],
)
def test_finetune_refuses_before_anything_is_written(checkpoint, tmp_path, given, said):
    changes = {"design": None} | given
    if (architecture := changes.pop("checkpoint", None)) is not None:
        checkpoint = str(tmp_path / "converted")
        converted(architecture, "delta:blocks=2").save_pretrained(checkpoint)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        run(checkpoint, tmp_path / "run", **changes)
    assert sorted(tmp_path.iterdir()) == before


def test_finetune_resumes_to_the_last_bit(checkpoint, tmp_path):
    whole = run(checkpoint, tmp_path / "whole")
    with pytest.raises(Stop):
        run(checkpoint, tmp_path / "cut", on_event=stop_after("train", 5))
    resumed = run(checkpoint, tmp_path / "cut")
    assert untimed(resumed.to_json()) == untimed(whole.to_json())
    assert final_files(tmp_path / "cut") == final_files(tmp_path / "whole")


def test_finetune_freeze_trains_the_stream_alone(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "run", freeze=True)
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / MODEL).state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    moved = [name for name, tensor in after.items() if is_added(name) and bool(tensor.abs().sum())]
    assert moved


def test_finetune_uses_a_rate_of_its_own_for_the_stream(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "run")
    line = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"][-1]
    assert line["residual_lr"] == pytest.approx(10 * line["lr"])
    groups = group_of(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / MODEL))
    assert set(groups.values()) >= {"stream", "matrices", "plain"}
    assert all(("stream" in name.split(".")) == (group == "stream") for name, group in groups.items())


def test_finetune_inserted_sublayers_count_as_added(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "run", layout="swa:window=4,attn,mlp", freeze=True, steps=2)
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / MODEL)
    kept = {name for name in model.state_dict() if not is_added(name)}
    assert kept == set(before)


def test_finetune_names_where_it_broke(checkpoint, tmp_path):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for part in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.down_proj):
            part.weight.mul_(1e30)
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(Diverged, match=r"layers\.1\.mlp"):
        run(str(tmp_path / "broken"), tmp_path / "run", design=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": ""}, "name the checkpoint"),
        ({"checkpoint": "no/such/model"}, "neither a directory nor"),
        ({"design": None, "layout": "swa,attn,mlp"}, "name the design too"),
        ({"design": None, "freeze": True}, "leaves nothing to train"),
        ({"design": "nothing"}, "nothing"),
        ({"steps": 0}, "steps"),
        ({"tokenizer": "bpe:x"}, "whole number"),
    ],
)
def test_finetune_refuses(checkpoint, tmp_path, changes, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokens = None if "tokenizer" in changes else toy_tokens()
    with pytest.raises(ValueError, match=said):
        finetune(settings(checkpoint, **changes), tmp_path / "run", tokens=tokens)
    assert not (tmp_path / "run").exists()


def test_finetune_refuses_ids_the_model_has_not(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="ids and the model has 24"):
        finetune(settings(checkpoint, tokenizer="bytes", corpus="pydoc"), tmp_path / "run")
