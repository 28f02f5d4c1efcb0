"""`residua convert` and `residua inspect`, from a directory to a directory."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.data import prepare
from residua.lab.diagnose.inspect import difference, mean_weights
from residua.lab.train import TrainConfig, train
from tests.hf import test_official
from tests.hf.models import base


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


def bytes_tokenizer():
    """Every byte a token, in the files of a Hugging Face tokenizer."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(symbols)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    base("llama", vocab_size=260).save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base.\n")
    return folder


def test_push_sends_our_card(made, monkeypatch):
    """What goes to the hub is what was saved, with our card and not Hugging Face's template."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils import hub

    sent = {}

    class Created:
        repo_id = "me/model"

    def commit(self, **given):
        for each in given["operations"]:
            with each.as_file() as file:
                sent[each.path_in_repo] = file.read()

    def absent(*_, **__):
        raise EntryNotFoundError("no card yet")

    monkeypatch.setattr(HfApi, "create_repo", lambda self, *_, **__: Created())
    monkeypatch.setattr(HfApi, "create_commit", commit)
    monkeypatch.setattr(hub.ModelCard, "load", absent)
    AutoModelForCausalLM.from_pretrained(made[0]).push_to_hub("me/model")
    assert {"README.md", "config.json", "model.safetensors", "modeling_residua.py"} <= sent.keys()
    assert b"delta:blocks=2,gate=alpha" in sent["README.md"]


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "model"
    said = invoke("convert", plain, "-d", "delta:blocks=2", "--out", out, "--json")
    return out, json.loads(said)


def test_convert_writes_a_model_with_its_tokenizer_and_card(plain, made):
    out, report = made
    assert report["design"] == "delta:blocks=2,gate=alpha"
    assert report["identity"]["max_gap"] == 0
    assert set(report["identity"]["batches"]) == {"text", "random"}
    model, before = AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(plain)
    ids = AutoTokenizer.from_pretrained(out)("a stream", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before(ids).logits)
    assert model.config.identity == report["identity"]
    card = (out / "README.md").read_text()
    for said in (
        "delta:blocks=2,gate=alpha",
        "2605.18855",
        "llama",
        "licence",
        "max |logit difference|",
        "library_name",
    ):
        assert said in card, said
    assert {each.name for each in out.parent.iterdir()} == {"model"}
    written = card + (out / "config.json").read_text()
    assert str(plain.parent) not in written, "a path of this machine in what is shown to others"


def test_convert_prints_what_it_did(plain, tmp_path):
    said = invoke(
        "convert", plain, "-d", "mudd", "--out", tmp_path / "m", "--layout", "canon,attn,mlp", "--dtype", "bfloat16"
    )
    assert "llama -> mudd, layout canon,attn,mlp" in said
    assert "identity: max |logit difference| / rms 0" in said
    assert "parameters added" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-d", "delta", "--dtype", "int8"), "--dtype"),
        ((), "--design is missing"),
        (("-d", "delta:blok=2"), "has no option 'blok'"),
        (("-d", "delta", "--layout", "mlp"), "keeps its own sublayers"),
    ],
)
def test_convert_refuses_wrong_arguments(arguments, said, plain, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(plain), *arguments, "--out", str(tmp_path / "out")])
    assert said in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("design", "said"), [("detla", "did you mean 'delta'"), ("elc", "train it from scratch")])
def test_wrong_design_is_said_before_weights_are_read(design, said, plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["convert", str(folder), "-d", design, "--out", str(tmp_path / "out")])
    assert said in str(done.exception)


def test_converted_model_is_refused_before_weights_are_read(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["convert", str(folder), "-d", "mudd", "--out", str(tmp_path / "out")])
    assert "converted already, to delta" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_convert_keeps_what_is_there(plain, tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(app, ["convert", str(plain), "-d", "delta", "--out", str(tmp_path)])
    assert "not empty" in str(done.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_convert_takes_a_released_checkpoint(tmp_path):
    (tmp_path / "released").mkdir()
    test_official.write(tmp_path / "released", "delta_block", "sigmoid_scalar")
    said = json.loads(invoke("convert", tmp_path / "released", "--out", tmp_path / "out", "--json"))
    assert said["stream"]["name"] == "delta_released"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.stream == said["stream"]
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "released"), "-d", "mudd", "--out", str(tmp_path / "other")]
    )
    assert "already has a design" in str(done.exception)


def test_inspect_shows_a_converted_model(made, tmp_path):
    out, _ = made
    said = invoke("inspect", out, "--prompt", "abc", "--site", "l1_mlp", "--png", tmp_path / "map.png")
    assert "delta:blocks=2,gate=alpha: 1 forwards, 3 tokens" in said
    assert "l1_mlp: token" in said
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(invoke("inspect", out, "--prompt", "abc", "--json"))
    assert found["tokens"] == ["a", "b", "c"]
    assert len(found["weights"]["l1_mlp"][0][0]) == 3
    for weights in found["weights"].values():
        total = torch.tensor(weights).sum(1)
        assert torch.allclose(total, torch.ones_like(total))
    assert found["loss"] > 0


def test_inspect_writes_a_page(made, tmp_path):
    said = CliRunner().invoke(app, ["inspect", str(made[0]), "--prompt", "abc", "--html", str(tmp_path / "page.html")])
    assert said.exit_code == 0
    assert said.stderr.endswith(f"written: {tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page[:2000]
    assert "not run on a prompt" not in page


def test_inspect_shows_two_models_and_their_difference(made, tmp_path):
    """The same model with one gate moved: every number of the difference is the second's minus the first's."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(made[0], other)
    tensors = load_file(other / "model.safetensors")
    for name, tensor in tensors.items():
        if ".stream." in name or name.startswith("stream."):
            tensors[name] = tensor + 0.5 * torch.arange(tensor.numel()).view_as(tensor) / tensor.numel()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = invoke("inspect", made[0], other, "--prompt", "abc", "--html", tmp_path / "both.html")
    first, second = json.loads(invoke("inspect", made[0], other, "--prompt", "abc", "--json"))
    assert f"loss: {second['loss'] - first['loss']:+.4f} nats per token" in said
    moved = difference(first, second)
    before, after = mean_weights(first), mean_weights(second)
    for row, old, new in zip(moved["weights"], before["weights"], after["weights"], strict=True):
        for gap, was, now in zip(row, old, new, strict=True):
            assert gap is None if was is None else gap == pytest.approx(now - was)
    assert any(abs(gap) > 1e-4 for row in moved["weights"] for gap in row if gap is not None)
    assert [each["title"] for each in first["paths"]["targets"]] == ["the token that comes next", "its first choice"]
    assert "The loss of the second" in (tmp_path / "both.html").read_text()


def test_inspect_refuses_what_it_cannot_show(plain, made, tmp_path):
    for arguments, said in (
        ((plain, "--prompt", "a"), "convert it first"),
        ((made[0], "--prompt", "a", "--site", "l9_attn"), "l9_attn"),
        ((made[0], "--prompt", ""), "empty"),
        ((made[0], "--prompt", "a" * 65), "shorten"),
        ((made[0], "--prompt", "a", "--png", tmp_path / "no" / "map.png"), "not a directory"),
        ((tmp_path / "no", "--prompt", "a"), "is not a directory"),
        ((made[0], made[0], made[0], "--prompt", "a"), "two side by side"),
        ((made[0], made[0], "--prompt", "a", "--png", tmp_path / "map.png"), "--png draws one model"),
        ((made[0], "--before", "--prompt", "a"), "is not a run of residua finetune"),
    ):
        done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
        assert said in str(done.exception), (arguments, done.exception)
    assert not list(tmp_path.iterdir())


def test_inspect_shows_a_run_of_ours(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(60):
        words = " ".join(f"w{(number * 37 + place * place) % 23}" for place in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(f"Text {number}. {words}\n")
    corpus = f"dir:{tmp_path / 'text'}"
    config = TrainConfig(
        design="attnres:block=2", width=16, depth=2, heads=2, steps=2, batch=2, context=16, eval_windows=2,
        corpus=corpus, tokenizer="bytes",
    )  # fmt: skip
    train(config, tmp_path / "run", tokens=prepare(corpus, "bytes", cache=tmp_path / "cache"))
    said = invoke("inspect", tmp_path / "run", "--prompt", "Text 1", "--site", "head")
    assert "attnres:block=2: 1 forwards, 6 tokens" in said
    assert "head: token" in said
    found = json.loads(invoke("inspect", tmp_path / "run", "--prompt", "Text 1", "--json"))
    grid = mean_weights(found)
    assert grid["sites"] == ["l0_mlp", "l1_attn", "l1_mlp", "head"]
    assert grid["sources"] == ["embed", "block0", "block1", "partial"]
    assert all(abs(sum(weight or 0 for weight in row) - 1) < 1e-5 for row in grid["weights"])
