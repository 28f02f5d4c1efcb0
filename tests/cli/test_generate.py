"""`residua generate`: text from a run, without the corpus it was trained on."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.data import prepare
from residua.lab.train import TrainConfig, train

runner = CliRunner()


@pytest.fixture(scope="module", params=["bytes", "bpe:270"])
def run(request, tmp_path_factory):
    """A short run on a small corpus, which is gone afterwards."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    for number in range(60):
        words = " ".join(f"w{(number * 37 + place * place) % 23}" for place in range(60))
        (folder / "text" / f"{number}.txt").write_text(f"Text {number}. {words} caf\u00e9\n")
    corpus = f"dir:{folder / 'text'}"
    tokens = prepare(corpus, request.param, cache=folder / "cache")
    config = TrainConfig(
        design="delta", width=16, depth=1, heads=2, steps=5, batch=2, context=16, eval_windows=2,
        corpus=corpus, tokenizer=request.param,
    )  # fmt: skip
    train(config, folder / "run", tokens=tokens)
    shutil.rmtree(folder / "text")
    shutil.rmtree(folder / "cache")
    return folder / "run"


def generate(run, *flags):
    result = runner.invoke(app, ["generate", str(run), "--prompt", "Text caf\u00e9", "-n", "20", *flags])
    assert result.exit_code == 0, result.output
    return result.output


def test_generate_continues_the_prompt_and_repeats_with_its_seed(run):
    first, again, other = (generate(run, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.startswith("Text caf\u00e9")
    assert first == again
    assert first != other


def test_generate_as_json_holds_the_tokens(run):
    found = json.loads(generate(run, "--json", "--temperature", "0"))
    assert found["prompt"] == "Text caf\u00e9"
    assert len(found["tokens"]) <= 20


def test_generate_from_what_is_no_run_names_what_is_missing(tmp_path):
    result = runner.invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert isinstance(result.exception, ValueError)
    assert "no config.json" in str(result.exception)
