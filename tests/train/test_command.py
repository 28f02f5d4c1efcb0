"""`residua train`: flags from the fields, one line per mistake, exit codes, and a real corpus."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.cli.train import resolve, schedules
from residua.lab.cost.ranks import predict_ranks
from residua.lab.cost.targets import sized
from residua.lab.train import TrainConfig
from residua.lab.train.config import config_fields
from residua.model import measure
from residua.scale.layout import SCHEDULES, Parallel, Pipes
from residua.scale.schedules import SCHEDULES as STAGES
from tests.train.harness import metrics

SMALL = ("--width", "16", "--depth", "2", "--heads", "2", "--batch", "2", "--context", "32", "--eval-windows", "4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small documents, and a cache of its own."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for number in range(60):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(60 + number))
        (root / "text" / f"{number:02d}.txt").write_text(f"Document {number}. {words}\n")
    return root


@pytest.fixture
def invoke(corpus, monkeypatch):
    monkeypatch.setenv("RESIDUA_CACHE", str(corpus / "cache"))

    def call(*arguments):
        return CliRunner().invoke(app, ["train", "--corpus", f"dir:{corpus / 'text'}", *SMALL, *map(str, arguments)])

    return call


def test_flags_are_the_fields():
    text = " ".join(CliRunner().invoke(app, ["train", "--help"]).output.split())
    for name, field in config_fields().items():
        default = str(field.default).lower() if field.kind is bool else field.default
        shown = field.help + ("" if default is None else f" [default: {default}]")
        flag = f"--{name.replace('_', '-')}"
        assert f"{flag} " in text
        assert shown in text[text.index(f"{flag} ") :], name


def test_flags_go_over_a_file_over_the_defaults(tmp_path):
    (tmp_path / "plan.toml").write_text('design = "delta"\nwidth = 32\nlr = 1e-2\ntied = false\n')
    (tmp_path / "plan.json").write_text(json.dumps({"design": "delta", "width": 32, "lr": 1e-2, "tied": False}))
    expected = TrainConfig(design="delta", width=64, lr=1e-2, tied=False)
    for name in ("plan.toml", "plan.json"):
        assert resolve(tmp_path / name, {"width": 64}) == expected
    (tmp_path / "bad.toml").write_text("width = ")
    with pytest.raises(ValueError, match=r"bad\.toml is not TOML"):
        resolve(tmp_path / "bad.toml", {})
    (tmp_path / "odd.json").write_text('{"with": 3}')
    with pytest.raises(ValueError, match="unknown training fields: with"):
        resolve(tmp_path / "odd.json", {})


def test_command_trains_and_prints_the_result(invoke, tmp_path):
    out = tmp_path / "run"
    flags = ("--design", "delta:blocks=2", "--steps", 3, "--no-tied", "--out", out, "--json")
    done = invoke(*flags)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads((out / "result.json").read_text())
    assert (result["design"], result["steps"]) == ("delta:blocks=2", 3)
    assert json.loads((out / "config.json").read_text())["tied"] is False
    assert "licence" in done.stderr
    assert "step 3/3" in done.stderr
    assert [line["step"] for line in metrics(out, "train")] == [1, 2, 3]
    again = invoke(*flags)
    assert json.loads(again.stdout) == result
    plain = invoke(*flags[:-1])
    assert "bits/byte after 192 tokens" in plain.stdout


def test_dry_run_prints_what_measure_counts_and_writes_no_run(invoke, tmp_path):
    flags = ("--design", "hyper", "--steps", 3, "--out", tmp_path / "run", "--dry-run")
    found = json.loads(invoke(*flags, "--json").stdout)
    sizes = measure(TrainConfig.from_json(found["config"]).model(found["vocab"]), 32)
    assert found["parameters"] == sizes.parameters
    assert found["stream_parameters"] == sizes.stream_parameters
    assert found["training_flops"] == 3 * sizes.flops_per_token * 3 * 64
    assert found["state_bytes_per_batch"] == max(sizes.state_floats.values()) * 64 * 4
    assert not (tmp_path / "run").exists()
    assert f"{sizes.parameters:,}" in invoke(*flags).stdout


def test_dry_run_plans_shards_and_stages_without_torchrun(invoke, tmp_path):
    flags = ("--batch", 8, "--accumulate", 2, "--depth", 4, "--parallel", "pp=2,fsdp=2", "--schedule", "interleaved",
             "--schedule", "wsd", "--out", tmp_path / "run", "--dry-run")  # fmt: skip
    found = json.loads(invoke(*flags, "--json").stdout)
    plan, config = found["plan"], TrainConfig.from_json(found["config"])
    assert config.schedule == "wsd"
    assert plan["pipeline"] == "interleaved, 4 micro-batches, 2 stages a rank"
    batch = plan["batch"]
    assert [batch[key] for key in ("rows", "copies", "rows_of_a_copy", "microbatches", "rows_of_a_microbatch")] == [
        16, 2, 8, 4, 2,
    ]  # fmt: skip
    assert batch["tokens"] == config.tokens_per_step
    wanted = predict_ranks(config.model(found["vocab"]), Parallel(pp=2, fsdp=2), rows=8, tokens=config.context,
                           microbatches=4, schedule="interleaved").to_json()  # fmt: skip
    assert {key: plan[key] for key in wanted} == wanted
    assert plan["hours"] == pytest.approx(wanted["time"]["step"] * config.steps / 3600)
    slow = json.loads(invoke(*flags, "--json", "--teraflops", 1, "--inside", 1, "--machine", 2).stdout)["plan"]
    assert slow["time"]["compute"] == pytest.approx(400 * plan["time"]["compute"])
    assert slow["time"]["communication"] > plan["time"]["communication"]
    said = invoke(*flags).stdout
    assert "pp=2,fsdp=2; interleaved, 4 micro-batches, 2 stages a rank" in said
    assert "optimizer state (AdamW)" in said
    assert "sent between stages (pp), per step" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_longest_commands_of_the_docs_are_planned_here(tmp_path):
    """A model of 7 billion parameters on eight devices, and a corpus that nobody fetches."""
    big = ("--design", "delta:blocks=8", "--size", "7.6B", "--parallel", "pp=4,fsdp=2", "--schedule", "interleaved")
    one = ("--design", "attnres:blocks=8", "--size", "1B", "--parallel", "fsdp=8", "--corpus", "hf:some/corpus",
           "--tokenizer", "bpe:4096")  # fmt: skip
    for flags, parameters in ((big, 6_947_639_296), (one, 850_000_000)):
        done = CliRunner().invoke(
            app, ["train", *flags, "--out", str(tmp_path / "run"), "--dry-run", "--json"], catch_exceptions=False
        )
        found = json.loads(done.stdout)
        assert found["parameters"] == pytest.approx(parameters, rel=0.01)
        assert found["plan"]["batch"]["context"] == 2048
    assert (found["vocab"], found["fingerprint"], found["passes"]) == (4096, None, None)


def test_a_size_is_a_recipe_that_flags_override():
    config = resolve(None, {"design": "delta", "lr": 1e-3}, "7.6B")
    assert (config.width, config.depth, config.heads, config.kv_heads, config.mlp_width) == (4096, 36, 32, 8, 12_288)
    assert (config.lr, config.batch, config.context, config.checkpointed) == (1e-3, 64, 2048, True)
    narrow = resolve(None, {"width": 64, "heads": 4, "depth": 2}, "220M")
    assert (narrow.width, narrow.depth, narrow.kv_heads, narrow.mlp_width) == (64, 2, None, None)
    for size in ("220M", "350M", "1B", "3B"):
        assert resolve(None, {}, size).context == 2048
    with pytest.raises(ValueError, match="unknown size '2B'; choose from demo, 220M"):
        resolve(None, {}, "2B")


def test_a_size_may_be_written_as_compare_takes_it():
    plain, config = resolve(None, {}), resolve(None, {"width": 32}, "4x64x2")
    assert (config.depth, config.width, config.heads) == (4, 32, 2)
    assert (config.lr, config.batch, config.context, config.dtype) == (
        plain.lr,
        plain.batch,
        plain.context,
        plain.dtype,
    )
    assert resolve(None, {}, "4x64").heads == plain.heads
    counted = sized("4x64x2").config
    assert (counted.depth, counted.width, counted.heads, counted.vocab) == (4, 64, 2, 256)
    assert sized("4x64", vocab=11).config.vocab == 11
    for size in ("4x", "x64", "4x64x", "4x64x2x1", "4 x 64", "-4x64"):
        with pytest.raises(ValueError, match="or write DEPTHxWIDTH"):
            resolve(None, {}, size)


def test_schedules_of_rates_and_of_stages_are_one_flag():
    assert schedules(["wsd"], None, None) == ({"schedule": "wsd"}, None)
    assert schedules(["zero-bubble", "cosine"], 8, None) == (
        {"schedule": "cosine"}, Pipes(schedule="zero_bubble", microbatches=8),
    )  # fmt: skip
    assert schedules([], None, 3) == ({}, Pipes(virtual=3))
    assert set(STAGES) == set(SCHEDULES)


WRONG = {
    "unknown schedule": (("--schedule", "linear"), "one of gpipe, 1f1b, interleaved, zero-bubble"),
    "two schedules": (("--schedule", "gpipe", "--schedule", "1f1b"), "given twice, as gpipe and 1f1b"),
    "stages of one process": (("--schedule", "gpipe"), "a pipeline's schedule and micro-batches need pp=N"),
    "a device without a plan": (("--teraflops", "9"), "of the device that --dry-run estimates for"),
    "rows that do not split": (("--parallel", "pp=2", "--microbatches", "5", "--dry-run"), "do not split into 5"),
    "more stages than blocks": (("--parallel", "pp=64", "--dry-run"), "more stages than there are blocks"),
    "unknown size": (("--size", "2B"), "unknown size '2B'"),
    "unknown design": (("--design", "detla"), "unknown design 'detla': did you mean 'delta'?"),
    "heads": (("--heads", "3"), "width 16 does not split into 3 heads"),
    "negative steps": (("--steps", "-4"), "steps must be at least 1, not -4"),
    "missing corpus": (("--corpus", "dir:/no/such/folder"), "/no/such/folder"),
    "unknown corpus": (("--corpus", "gutenberg"), "gutenberg"),
    "unknown tokenizer": (("--tokenizer", "runes"), "runes"),
    "long context": (("--context", "999999"), "fewer than one window"),
    "unknown sink": (("--track", "abacus"), "unknown sink 'abacus'"),
    "unknown resume": (("--resume", "perhaps"), "resume is auto, never or must"),
    "nothing to resume": (("--resume", "must"), "holds no run to resume"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_mistake_is_one_line_and_writes_nothing(corpus, tmp_path, monkeypatch, flags, message):
    monkeypatch.setenv("RESIDUA_CACHE", str(corpus / "cache"))
    arguments = ["train", "--corpus", f"dir:{corpus / 'text'}", *SMALL, "--out", str(tmp_path / "run"), *flags]
    failed = CliRunner().invoke(app, arguments)
    assert isinstance(failed.exception, ValueError | OSError | TypeError), failed.output
    assert message in str(failed.exception)
    assert "\n" not in str(failed.exception)
    assert not (tmp_path / "run").exists()


def test_missing_out_is_said(invoke):
    assert "--out is missing" in str(invoke("--steps", 1).exception)


def test_divergence_is_exit_code_1_and_names_the_site(invoke, tmp_path):
    failed = invoke("--steps", 3, "--explode", "1e-9", "--out", tmp_path / "run")
    assert failed.exit_code == 1
    assert "the gradient exploded" in failed.stderr
    assert "site" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_command_saves_says_so_and_gives_its_exit_code(corpus, tmp_path, number):
    arguments = ["--corpus", f"dir:{corpus / 'text'}", *SMALL, "--steps", "100000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-c", "from residua.cli import main; main()", "train", *arguments],
        stderr=subprocess.PIPE, text=True,
        env=os.environ | {"RESIDUA_CACHE": str(corpus / "cache"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        while "step 0/100000" not in (line := process.stderr.readline()):
            assert line, "ended early"
        process.send_signal(number)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number, rest
    assert f"residua: stopped by {number.name} after step " in rest
    assert "run the same command to continue" in rest
    assert "Traceback" not in rest
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name in rest
