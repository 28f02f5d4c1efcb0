"""train(): same seed, same run; the same start and batches for every design; a run directory has one owner."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import residua
from residua.lab.common.files import read_json
from residua.lab.train import TrainConfig, Trainer, load_model, train
from residua.lab.train.folder import RunFolder
from residua.lab.train.optim import group_of
from residua.lab.train.reproducible import random_states, reproducible
from tests.train.harness import (
    Stop,
    ToyTokens,
    files_below,
    final_files,
    metrics,
    outcome,
    run,
    stop_after,
    toy_config,
    toy_tokens,
    untimed,
)  # fmt: skip

RECIPES = {
    "plain": {},
    "muon": {"optimizer": "muon", "residual_lr": 3e-3},
    "encoder": {"objective": "mlm", "schedule": "wsd"},
    "bf16": {"dtype": "bfloat16"},
    "bf16-fp32-stream": {"dtype": "bfloat16", "fp32_stream": True, "design": "mudd"},
    "accumulated": {"batch": 2, "accumulate": 3, "clip": 0.0, "design": "hyper"},
    "checkpointed": {"checkpointed": True, "design": "attnres:block=2", "layout": "swa:window=4,attn,mlp"},
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=pytest.mark.slow if changes else ()) for name, changes in RECIPES.items()],
)
def test_run_twice_is_the_same_and_resumed_is_the_same(tmp_path, changes):
    config = toy_config(**changes)
    run(tmp_path / "one", config)
    run(tmp_path / "two", config)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    for kind, step in (("valid", 0), ("train", 3), ("saved", 4), ("train", 7), ("valid", 8), ("saved", 12)):
        with pytest.raises(Stop):
            run(tmp_path / "three", config, on_event=stop_after(kind, step))
    run(tmp_path / "three", config)
    assert outcome(tmp_path / "three") == outcome(tmp_path / "one")


def test_run_learns(tmp_path):
    result = run(tmp_path, toy_config(steps=60, eval_every=30, save_every=60))
    first, *_, last = metrics(tmp_path, "valid")
    assert last["loss"] < first["loss"] - 0.5
    assert result.loss == last["loss"]
    assert [line["step"] for line in metrics(tmp_path, "train")] == list(range(1, 61))


@pytest.mark.slow
def test_every_design_starts_alike_and_sees_the_same_batches(tmp_path):
    tokens, starts, batches = toy_tokens(), [], []
    for design in residua.names():
        config = toy_config(design=design, steps=2, lane_norms="shared")
        trainer = Trainer(config, tokens)
        belongs = group_of(trainer.model)
        starts.append({n: p.detach() for n, p in trainer.model.named_parameters() if belongs[n] != "stream"})
        run(tmp_path / design, config, tokens=tokens)
        batches.append([line["batch"] for line in metrics(tmp_path / design, "train")])
    assert all(one == batches[0] for one in batches)
    assert len(set(batches[0])) == 2
    for one in starts:  # a design that normalises by itself leaves out norms of the backbone
        assert {name for name in starts[0] if not name.endswith("norm.weight")} <= one.keys() <= starts[0].keys()
        # where a design takes more channels than the width, the first are those of the stream
        assert all(torch.equal(own[: len(starts[0][name])], starts[0][name]) for name, own in one.items())
    another = Trainer(toy_config(seed=4), tokens).model.embed.weight
    assert not torch.equal(another, starts[0]["embed.weight"])


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_accumulation_is_one_larger_batch(tmp_path, objective):
    settings = {"objective": objective, "steps": 4, "lr": 1e-3, "clip": 0.0}
    whole = run(tmp_path / "whole", toy_config(batch=6, **settings))
    split = run(tmp_path / "split", toy_config(batch=2, accumulate=3, **settings))
    assert whole.loss == pytest.approx(split.loss, rel=1e-5)
    lines = [metrics(tmp_path / name, "train") for name in ("whole", "split")]
    assert [line["loss"] for line in lines[0]] == pytest.approx([line["loss"] for line in lines[1]], rel=1e-5)
    assert [line["gradient_norm"] for line in lines[0]] == pytest.approx(
        [line["gradient_norm"] for line in lines[1]], rel=1e-4
    )
    assert whole.tokens == split.tokens == 4 * 6 * 12


def test_recomputing_blocks_changes_no_bit(tmp_path):
    run(tmp_path / "kept", toy_config())
    run(tmp_path / "again", toy_config(checkpointed=True))
    assert final_files(tmp_path / "kept") == final_files(tmp_path / "again")


def test_clipping_bounds_what_is_applied(tmp_path):
    tokens, norms = toy_tokens(), {}
    for clip in (0.0, 1e-3):
        trainer = Trainer(toy_config(clip=clip, beta1=0.0), tokens)
        norms[clip] = trainer.update()["gradient_norm"]
        moments = [value for key, value in trainer.optimizers.tensors().items() if key.endswith("/exp_avg")]
        applied = float(torch.cat([value.flatten() for value in moments]).norm())
        assert applied == pytest.approx(norms[clip] if clip == 0 else clip, rel=1e-3)
    assert norms[0.0] == norms[1e-3] > 1e-3  # the line tells the norm before clipping


def test_metrics_lines_tell_rates_tokens_passes_and_units(tmp_path):
    tokens = toy_tokens()
    config = toy_config(lr=1e-2, residual_lr=2e-2, stream_rms=True, log_every=5)
    result = run(tmp_path, config, tokens=tokens)
    trained, validated = metrics(tmp_path, "train"), metrics(tmp_path, "valid")
    assert [line["step"] for line in trained] == [5, 10, 12]
    assert [line["step"] for line in validated] == [0, 4, 8, 12]
    for line in trained + validated:
        assert line["tokens"] == line["step"] * 4 * 12
        assert line["passes"] == pytest.approx(line["tokens"] / 3000)
    for line in trained:
        assert line["residual_lr"] == pytest.approx(2 * line["lr"])
    for line in validated:
        bits = line["loss"] / torch.log(torch.tensor(2.0)).item() * 600 / 900
        assert line["bits_per_byte"] == pytest.approx(bits)
        assert line["perplexity"] == pytest.approx(torch.tensor(line["loss"]).exp().item(), rel=1e-5)
        assert list(line["stream_rms"]) == ["l0_attn", "l0_mlp", "l1_attn", "l1_mlp", "head"]
        assert all(value > 0 for value in line["stream_rms"].values())
    assert result.passes == pytest.approx(12 * 48 / 3000)
    assert result.time["tokens_per_second"] > 0
    assert result.time["peak_memory"] > 2**20


def test_result_and_model_come_from_the_directory(tmp_path):
    result = run(tmp_path)
    assert read_json(tmp_path / "result.json") == result.to_json()
    assert TrainConfig.from_json(read_json(tmp_path / "config.json")) == toy_config()
    manifest = read_json(tmp_path / "manifest.json")
    assert manifest["data"]["fingerprint"] == "toy"
    assert manifest["versions"]["torch"] == torch.__version__
    events = []
    again = run(tmp_path, on_event=events.append)
    assert again == result
    assert [event["kind"] for event in events] == ["done"]  # nothing was trained
    model, trainer = load_model(tmp_path), Trainer(toy_config(), toy_tokens())
    trainer.model.load_state_dict(model.state_dict())
    assert trainer.validate()["loss"] == result.loss


def test_designs_that_draw_numbers_resume_alike(tmp_path):
    """A stream with dropout: its random state is part of the checkpoint."""

    @residua.register("dropped")
    class Dropped(residua.design("standard")):
        """h <- h + dropout(f(norm(h)))."""

        paper = "a test"

        def write(self, state, site, read, y):
            return super().write(state, site, read, nn.functional.dropout(y, 0.5))

    try:
        config = toy_config(design="dropped")
        run(tmp_path / "one", config)
        with pytest.raises(Stop):
            run(tmp_path / "two", config, on_event=stop_after("train", 6))
        torch.randn(3)
        run(tmp_path / "two", config)
        assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    finally:
        residua.unregister("dropped")


def test_training_leaves_the_caller_s_random_states_and_threads(tmp_path):
    before, threads = random_states(), torch.get_num_threads()
    run(tmp_path, toy_config(steps=1, threads=2))
    after = random_states()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.get_num_threads() == threads
    torch.use_deterministic_algorithms(False)
    with reproducible(toy_config(threads=2)):
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


REFUSED = {
    "another rate": ({"lr": 5e-3}, "auto", "lr is 0.01 there and 0.005 here"),
    "another design": ({"design": "standard"}, "auto", "design is 'delta' there and 'standard' here"),
    "another seed": ({"seed": 8}, "must", "seed is 3 there and 8 here"),
    "never resume": ({}, "never", "holds a run already"),
    "unknown resume": ({}, "maybe", "resume is auto, never or must"),
}


@pytest.mark.parametrize(("changes", "resume", "message"), REFUSED.values(), ids=REFUSED)
def test_directory_of_another_run_is_refused_untouched(tmp_path, changes, resume, message):
    with pytest.raises(Stop):
        run(tmp_path, on_event=stop_after("saved", 4))
    before = files_below(tmp_path)
    with pytest.raises((FileExistsError, ValueError), match=message):
        run(tmp_path, toy_config(**changes), resume=resume)
    assert files_below(tmp_path) == before


def test_directory_with_other_files_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(FileExistsError, match=r"holds no run \(thesis.tex\)"):
        run(tmp_path)
    assert files_below(tmp_path) == {"thesis.tex": b"do not touch"}
    with pytest.raises(FileExistsError, match="is a file"):
        run(tmp_path / "thesis.tex")


def test_resume_must_have_something_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        run(tmp_path / "new", resume="must")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_model(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_data_are_refused_on_resume(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path, on_event=stop_after("saved", 4))
    tokens = toy_tokens()
    other = ToyTokens(tokens.train, tokens.valid, manifest={"fingerprint": "other"})
    with pytest.raises(ValueError, match="was trained on data toy, but pydoc is other now"):
        run(tmp_path, tokens=other)


def test_what_cannot_start_writes_nothing(tmp_path):
    for changes, error in (({"context": 5000}, "fewer than one window"), ({"device": "cuda"}, "no CUDA device")):
        with pytest.raises(ValueError, match=error):
            run(tmp_path / "new", toy_config(**changes))
    with pytest.raises(ValueError, match="unknown sink 'abacus'"):
        run(tmp_path / "new", track=["abacus"])
    assert not (tmp_path / "new").exists()


def test_first_moments_of_a_killed_run_are_no_obstacle(tmp_path):
    config = toy_config(steps=1)
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    for name in ("run.lock", ".config.json.writing", ".manifest.json.writing"):
        (folder.path / name).write_text("{")
    folder.check(config, "auto")
    run(folder.path, config)
    assert json.loads((folder.path / "config.json").read_text()) == config.to_json()


def test_damaged_checkpoint_is_told_and_the_one_before_gives_the_same_end(tmp_path):
    run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "hurt", on_event=stop_after("train", 10))
    model = tmp_path / "hurt" / "checkpoints" / "step-00000008" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    events = []
    run(tmp_path / "hurt", on_event=events.append)
    (told,) = (event for event in events if event["kind"] == "damaged")
    assert told["checkpoint"] == "step-00000008"
    assert told["step"] == 4
    assert "model.safetensors is damaged" in told["reason"]
    whole, hurt = outcome(tmp_path / "whole"), outcome(tmp_path / "hurt")
    assert hurt["checkpoints"] == ["damaged-step-00000008", *whole["checkpoints"]]
    assert hurt | {"checkpoints": None} == whole | {"checkpoints": None}


def test_unfinished_last_line_of_metrics_is_repaired(tmp_path):
    run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "torn", on_event=stop_after("train", 6))
    path = tmp_path / "torn" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run(tmp_path / "torn")
    assert outcome(tmp_path / "torn") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_compiled_run_resumes_alike_and_agrees_with_eager(tmp_path):
    small = {"layout": "mlp", "depth": 1, "steps": 3, "save_every": 1, "eval_every": 3}
    config = toy_config(compile=True, **small)
    with pytest.raises(Stop):
        run(tmp_path / "resumed", config, on_event=stop_after("saved", 2))
    run(tmp_path / "resumed", config)
    run(tmp_path / "whole", config)
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "whole")
    eager = train(toy_config(**small), tmp_path / "eager", tokens=toy_tokens())
    assert untimed(read_json(tmp_path / "whole" / "result.json"))["loss"] == pytest.approx(eager.loss, rel=1e-4)
