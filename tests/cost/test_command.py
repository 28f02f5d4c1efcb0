"""`residua cost`: tables, JSON, sweeps, the asymmetry, foreign configurations, and refusals."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.cost import predict
from residua.lab.cost.asymmetry import PLACEMENTS, asymmetry
from residua.lab.cost.sweep import sweep, values_of
from residua.lab.cost.targets import FOREIGN, from_hugging_face, sized

TINY = ["--size", "demo", "--depth", "2", "--width", "16", "--heads", "2", "--vocab", "32", "--tokens", "16"]
SMALL = sized("demo", depth=4, width=16, heads=2, vocab=32)


def run(*flags: str) -> str:
    done = CliRunner().invoke(app, ["cost", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_command_compares_with_standard():
    said = run("-d", "mhc", *TINY)
    assert re.search(r"^ +standard +mhc", said, re.MULTILINE)
    for line in ("FLOPs per token", "bytes per token (upper bound)", "largest pipeline cut", "decode cache"):
        assert line in said


def test_command_measures_beside_the_prediction():
    found = json.loads(run("-d", "attnres", *TINY, "--measure", "--json"))["designs"]["attnres"]
    guess, seen = found["predicted"], found["measured"]
    assert guess["parameters"] == seen["parameters"]
    assert guess["cut_bytes"] == seen["cut_bytes"]
    assert guess["flops"] == pytest.approx(seen["flops"], rel=0.02)
    said = run(*TINY, "--measure")
    assert re.search(r"parameters .* exact", said)
    assert re.search(r"FLOPs per token, forward .* [+-]\d\.\d%", said)


def test_doubling_and_lists_are_sweeps():
    assert values_of("T=512:8192") == ("T", [512, 1024, 2048, 4096, 8192])
    assert values_of("L=4,6,7") == ("L", [4, 6, 7])
    assert values_of("K=3:13") == ("K", [3, 6, 12])


@pytest.mark.parametrize("text", ["T", "Q=1:2", "T=", "T=a:b", "T=0:4", "T=8:4", "L=1,x", "K=-1"])
def test_wrong_sweep_is_refused(text):
    with pytest.raises(ValueError, match=f"--sweep {text}"):
        values_of(text)


@pytest.mark.parametrize(
    ("text", "design", "layout", "grows"),
    [
        ("T=8:32", "standard", "attn,mlp", "cache_bytes"),
        ("L=2,4,6", "attnres", "attn,mlp", "parameters"),
        ("window=2:8", "standard", "swa,attn,mlp", "halo_bytes"),
        ("K=1:4", "depthswa", "attn,mlp", "cut"),
    ],
)
def test_sweep_moves_one_quantity(text, design, layout, grows):
    target = sized("demo", depth=4, width=16, heads=2, vocab=32, layout=layout).of(design)
    costs = list(sweep(target, text, 16).values())
    seen = [getattr(one, grows) for one in costs]
    assert len(costs) == 3
    assert seen == sorted(set(seen))


def test_sweep_of_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="has no swa; try --layout swa,attn,mlp"):
        sweep(SMALL, "window=2:4", 16)
    with pytest.raises(ValueError, match="mhc has no option window"):
        sweep(SMALL.of("mhc"), "K=2:4", 16)


def test_command_sweeps():
    rows = json.loads(run("-d", "depthswa", *TINY, "--sweep", "K=1:4", "--json"))["designs"]["depthswa"]
    assert list(rows) == ["1", "2", "4"]
    assert len(re.findall(r"^ depthswa", run("-d", "depthswa", *TINY, "--sweep", "K=1:4"), re.MULTILINE)) == 3


def test_asymmetry_is_what_the_two_axes_trade():
    data = asymmetry(SMALL, (1, 2, 4), 16)
    tokens, depth, static = (data["added"][label] for label in PLACEMENTS)
    assert tokens["cut"] == [0, 0, 0]  # nothing of a window over tokens crosses a pipeline cut
    assert all(added > 0 for added in depth["cut"][1:])
    assert depth["cache_bytes"] == depth["halo_bytes"] == static["halo_bytes"] == [0, 0, 0]
    width, layers = 16, 4
    assert tokens["cache_bytes"] == [2 * width * window * layers * 2 for window in (1, 2, 4)]
    assert tokens["halo_bytes"] == [2 * width * (window - 1) * layers * 2 for window in (1, 2, 4)]
    assert asymmetry(SMALL, (4, 8), 16)["added"]["depth: attention over states (depthswa)"]["flops"][1] is None


@pytest.mark.slow
def test_asymmetry_draws_the_same_bytes_twice(tmp_path):
    for name in ("one", "two"):
        run(*TINY, "--asymmetry", "--out", str(tmp_path / name))
    for file in ("asymmetry.svg", "asymmetry.png", "asymmetry.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert "depth: attention over states" in (tmp_path / "one" / "asymmetry.json").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-d", "nope"], "unknown design 'nope'"),
        (["--size", "9B"], "unknown size '9B'"),
        (["--dtype", "int8"], "--dtype is float32, bfloat16, float16"),
        (["--path", "fast"], "path is reference or fused"),
        (["--measure", "--sweep", "T=1:2"], "exclude each other"),
        (["--measure", "--path", "fused"], "--measure runs the reference path in float32"),
        (["--out", "x"], "--out is for --asymmetry"),
        (["-d", "mhc", "--asymmetry"], "drop the designs"),
        (["--tokens", "0"], "must be at least 1"),
        (["--config", "x", "--depth", "3"], "--depth cannot be combined with --config"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--size", "7.6B", "--measure"], "measuring allocates the model"),
    ],
)
def test_wrong_question_is_refused(flags, message):
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        CliRunner().invoke(app, ["cost", *flags], catch_exceptions=False)


SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip


def saved(folder, **changes) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(SHAPE | changes))
    return str(file)


@pytest.mark.eval
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("tied", [True, False])
def test_foreign_configuration_has_the_parameters_of_its_model(kind, tied, tmp_path):
    import transformers

    changes = {"tie_word_embeddings": tied, "pad_token_id": 0}
    changes |= {"head_dim": 16} if kind in ("qwen3", "gemma") else {}
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **changes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    target = from_hugging_face(tmp_path)
    cost = predict(target.config, 8, build=target.build)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    head = changes.get("head_dim", 8)
    assert cost.cache_bytes == 2 * 8 * 2 * 2 * head * 4


def test_foreign_configuration_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"knows the model types llama, mistral, .*, not 'gpt2'"):
        from_hugging_face(saved(tmp_path, model_type="gpt2"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="has no 'hidden_size', which a llama model needs"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        from_hugging_face(tmp_path)


def test_command_takes_a_foreign_configuration(tmp_path):
    file = saved(tmp_path, model_type="qwen3", head_dim=16)
    found = json.loads(run("-d", "delta", "--config", file, "--tokens", "16", "--json"))
    assert found["designs"]["delta"]["predicted"]["stream_parameters"] > 0
    with pytest.raises(ValueError, match="measure a --size"):
        CliRunner().invoke(app, ["cost", "--config", file, "--measure", "--tokens", "8"], catch_exceptions=False)
