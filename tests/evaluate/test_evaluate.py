"""`residua eval` agrees with training, and the harness's answers with arithmetic done by hand."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.data import prepare
from residua.lab.data.tokenizer import Bytes
from residua.lab.evaluate import Opened, corpus_loss, open_model
from residua.lab.train import TrainConfig, train
from tests.refusals.harness import residua


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of our own: some lines, many times over with a number in them."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(60):
        lines = "".join(f"line {number} {i} the quick brown fox jumps over the lazy dog\n" for i in range(20))
        (folder / f"{number}.txt").write_text(lines)
    return f"dir:{folder}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = TrainConfig(
        corpus=text, width=16, depth=1, heads=2, steps=4, batch=4, context=32, eval_windows=8, design="delta"
    )
    return folder, train(config, folder)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A tiny Llama over bytes."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_corpus_loss_is_the_loss_of_the_run(trained, text):
    folder, result = trained
    opened = open_model(folder)
    assert opened.design == "delta"
    found = corpus_loss(opened, prepare(text, opened.tokenizer), context=32, windows=8, batch=3)
    assert found["loss"] == pytest.approx(result.loss, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(result.bits_per_byte, rel=1e-5)
    assert found["windows"] == 8


def test_corpus_loss_of_a_hugging_face_model(hugging_face, text):
    opened = open_model(hugging_face)
    assert opened.design == "base"
    tokens = prepare(text, opened.tokenizer)
    found = corpus_loss(opened, tokens, context=32, windows=2)
    assert 7 < found["bits_per_byte"] < 9  # an untrained model knows nothing: about 8 bits
    with pytest.raises(ValueError, match="64 tokens at most"):
        corpus_loss(opened, tokens, context=65)


class Counting(torch.nn.Module):
    """Always says that the next byte is one more, with probability p."""

    plan = None

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 258)
        return logits.scatter(-1, (ids + 1).unsqueeze(-1) % 258, 3.0)


COUNTING = Opened(Counting(), Bytes(), "counting", 258, 16)


def test_harness_scores_a_continuation_by_its_own_probability():
    from residua.lab.evaluate.harness import _score

    sure = torch.zeros(258).scatter(0, torch.tensor([5]), 3.0).log_softmax(-1)
    expected, wrong = float(sure[5]), float(sure[6])
    assert _score(COUNTING, "a", "bc") == (pytest.approx(2 * expected), True)
    assert _score(COUNTING, "a", "bd") == (pytest.approx(expected + wrong), False)


@pytest.mark.parametrize("length", [3, 15, 16, 17, 40])
def test_harness_rolling_counts_every_token_once(length):
    from residua.lab.evaluate.harness import _rolling

    text = "".join(chr(48 + i) for i in range(length))
    sure = torch.zeros(258).scatter(0, torch.tensor([5]), 3.0).log_softmax(-1)
    # the first byte follows the end of a document, which counting takes for byte 0
    assert _rolling(COUNTING, text) == pytest.approx(float(sure[6] + (length - 1) * sure[5]), rel=1e-5)


@pytest.mark.eval
@pytest.mark.slow
def test_command_runs_local_harness_tasks_without_a_hub(trained, text):
    code = "from residua.cli import main; main()"
    arguments = [str(trained[0]), "--corpus", text, "--context", "32", "--windows", "4", "--count", "6", "--json"]
    tasks = [part for name in ("cloze", "bits", "copy") for part in ("--task", f"residua_{name}")]
    ran = subprocess.run(
        [sys.executable, "-c", code, "eval", *arguments, *tasks],
        capture_output=True, text=True, check=True, env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    found = json.loads(ran.stdout)
    assert 0 <= found["tasks"]["residua_cloze"]["acc"] <= 1
    assert found["tasks"]["residua_bits"]["bits_per_byte"] > 0
    assert "exact_match" in found["tasks"]["residua_copy"]
    # the harness's bits per byte and ours are of the same model: both far from knowing, and near each other
    assert found["tasks"]["residua_bits"]["bits_per_byte"] == pytest.approx(found["loss"]["bits_per_byte"], rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "is not a directory"),
        (["RUN", "--task", "residua_none"], "no local task"),
        (["RUN", "--batch", "0"], "batch must be"),
        (["RUN", "--context", "1"], "at least 2"),
    ],
)
@pytest.mark.slow
@pytest.mark.eval
def test_command_refuses(trained, text, arguments, said):
    given = [str(trained[0]) if part == "RUN" else part for part in arguments]
    ran = residua("eval", *given, "--corpus", text, "--windows", "2")
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.eval
@pytest.mark.parametrize(
    ("task", "words"), [("residua_nothing", "there are residua_"), ("no_such_task", "lm-eval ls tasks")]
)
def test_unknown_task_is_refused_before_a_model_is_opened(tmp_path, task, words):
    said = CliRunner().invoke(app, ["eval", str(tmp_path / "no model"), "--task", task])
    assert said.exit_code != 0
    assert words in str(said.exception)


def test_encoder_has_no_next_token_loss(tmp_path, text):
    config = TrainConfig(
        corpus=text, width=16, depth=1, heads=2, steps=1, batch=2, context=16, eval_windows=2, objective="mlm"
    )
    train(config, tmp_path / "run")
    done = residua("eval", str(tmp_path / "run"), "--corpus", text, "--context", "16")
    assert done.code == 2
    assert "the model is an encoder" in done.err
