"""`train` on two processes: the batches, numbers and files of one; signals, divergence, damage, moves, refusals."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest

from residua.lab.common.files import read_json
from residua.lab.train import Diverged, load_model, sharded
from residua.lab.train import checkpoint as checkpoints
from tests.scale.common import BROKEN, DEEP, DOUBLE, RUNS, TOLERANCE, in_float64, launch, once
from tests.train.harness import Stop, metrics, run, stop_after, toy_config

pytestmark = pytest.mark.slow
WAYS = ("dp=2", "fsdp=2", "tp=2", "pp=2")
NEAR = {"plain": 2e-5, "encoder": 2e-4, "bfloat16": 2e-3}
"""Of the losses of 12 updates in float32, or under autocast: sums in another order, and what 12 updates make of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(out):
        with suppress(Stop):
            run(out / "handed over", on_event=stop_after("train", 5))
        launch("on_train", 2, out)
        for name, changes in RUNS.items():
            run(out / name, toy_config(**changes))
        with in_float64():
            run(out / "double", toy_config(**DEEP))

    return once(tmp_path_factory, "on_train", make)


@pytest.fixture(scope="module")
def seen(folder):
    return [json.loads((folder / f"on_train.json.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_two_ranks_is_the_run_of_one(folder, seen, name, way):
    one, two = metrics(folder / name), metrics(folder / f"{name} {way}")
    for here, there in zip(one, two, strict=True):
        assert here.keys() == there.keys()
        assert [here[k] for k in ("kind", "step", "tokens")] == [there[k] for k in ("kind", "step", "tokens")]
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=NEAR[name])
        if "gradient_norm" in here:
            assert there["gradient_norm"] == pytest.approx(here["gradient_norm"], rel=100 * NEAR[name])
        for site, value in here.get("stream_rms", {}).items():
            assert there["stream_rms"][site] == pytest.approx(value, rel=20 * NEAR[name])
    first, other = (rank[f"{name} {way}"] for rank in seen)
    assert first["events"][-1]["kind"] == "done"
    assert other["events"] == []  # rank 0 alone speaks
    for key in ("loss", "parameters", "stream_parameters", "tokens", "config"):
        assert first["result"][key] == other["result"][key]
    assert first["result"]["parameters"] == read_json(folder / name / "result.json")["parameters"]


@pytest.mark.parametrize("name", DOUBLE)
def test_in_float64_the_run_is_the_same_to_1e_10(folder, seen, name):
    assert "error" not in seen[0][f"double {name}"]["result"], seen[0][f"double {name}"]["result"]
    one, two = metrics(folder / "double"), metrics(folder / f"double {name}")
    for here, there in zip(one, two, strict=True):
        assert here.keys() == there.keys()
        assert here.get("batch") == there.get("batch")
        for key in ("loss", "gradient_norm"):
            if key in here:
                assert there[key] == pytest.approx(here[key], abs=TOLERANCE, rel=TOLERANCE)
        for site, value in here.get("stream_rms", {}).items():
            assert there["stream_rms"][site] == pytest.approx(value, rel=1e-6)  # its squares are float32
    one, two = load_model(folder / "double").state_dict(), load_model(folder / f"double {name}").state_dict()
    assert one.keys() == two.keys()


@pytest.mark.parametrize("label", ["offload", "compiled"])
def test_pieces_on_the_host_and_compiled_blocks_are_the_run_of_one(folder, seen, label, tmp_path):
    assert "error" not in seen[0][label]["result"], seen[0][label]["result"]
    run(tmp_path, toy_config(steps=4))
    for here, there in zip(metrics(tmp_path), metrics(folder / label), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5)
    assert seen[0]["frames"]["ok"] == seen[0]["frames"]["total"] > 0  # every block was compiled, in every form


def test_copies_save_the_files_of_one_process_and_pieces_a_shard_each(folder):
    assert checkpoints.read_state(max((folder / "plain dp=2/checkpoints").glob("step-*")))["format"] == 1
    last = max((folder / "plain fsdp=2/checkpoints").glob("step-*"))
    names = sorted(path.name for path in last.iterdir())
    assert [name.partition("-model")[0] for name in names] == [
        "rng.safetensors", "shard-00001", "shard-00002", "state.json",
    ]  # fmt: skip
    assert b"\x80\x04" not in b"".join(path.read_bytes()[:2] for path in last.iterdir())  # no pickle


@pytest.mark.parametrize("way", WAYS)
def test_one_process_reads_what_two_ranks_saved(folder, way):
    one, two = load_model(folder / "plain").state_dict(), load_model(folder / f"plain {way}").state_dict()
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-5


def test_a_run_goes_on_in_another_layout_and_says_so(folder, seen):
    first = seen[0]
    for label, step in (("moved", 5), ("moved again", 9)):
        for rank in seen:
            assert rank[label]["result"]["error"] == "Interrupted"
            assert f"stopped by SIGTERM after step {step} of 12" in rank[label]["result"]["text"]
    (relaid,) = [event for event in first["moved again"]["events"] if event["kind"] == "relaid"]
    assert (relaid["before"]["parallel"], relaid["now"]["parallel"]) == ("dp=2", "fsdp=2")
    laid = read_json(folder / "moved/manifest.json")["ranks"]
    assert [each["parallel"] for each in laid] == ["dp=2", "fsdp=2", "tp=2"]
    config = read_json(folder / "moved/config.json")
    assert config == read_json(folder / "plain/config.json")  # the layout is no part of it
    for here, there in zip(metrics(folder / "plain"), metrics(folder / "moved"), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5)


def test_stages_go_on_with_what_one_process_began_and_pieces_with_theirs(folder, seen):
    events = [event for event in seen[0]["handed over"]["events"] if event["kind"] in ("resumed", "relaid")]
    assert [event["step"] for event in events] == [4, 4]
    assert events[1]["before"]["parallel"] == "dp=1"
    assert events[1]["now"]["pipeline"] == "1f1b, 4 micro-batches, 1 stages a rank"
    assert "stopped by SIGTERM after step 9 of 12" in seen[1]["handed over"]["result"]["text"]
    laid = read_json(folder / "handed over/manifest.json")["ranks"]
    assert [each["parallel"] for each in laid] == ["dp=1", "pp=2", "fsdp=2"]
    for here, there in zip(metrics(folder / "plain"), metrics(folder / "handed over"), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5)


@pytest.mark.parametrize("way", ["fsdp=2", "pp=2"])
def test_one_process_goes_on_with_what_ranks_began(folder, tmp_path, way):
    import shutil

    shutil.copytree(folder / f"plain {way}", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    (tmp_path / "run/result.json").unlink()
    events = []
    run(tmp_path / "run", toy_config(), on_event=events.append)
    assert [event["kind"] for event in events[:2]] == ["resumed", "relaid"]
    last = metrics(tmp_path / "run")[-1]
    assert last["loss"] == pytest.approx(metrics(folder / "plain")[-1]["loss"], abs=2e-5)


def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_taken(folder, seen):
    first = seen[0]["repaired"]
    (damaged,) = [event for event in first["events"] if event["kind"] == "damaged"]
    assert damaged["checkpoint"] == "step-00000011"
    assert damaged["reason"].startswith("shard-00002-model")
    assert damaged["step"] == 8
    assert first["result"]["loss"] == seen[0]["plain fsdp=2"]["result"]["loss"]  # the same bits
    assert metrics(folder / "damaged") == metrics(folder / "plain fsdp=2")


def test_a_half_written_shard_is_named_by_one_process_too(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "plain pp=2", tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    shard = max((tmp_path / "run/checkpoints/step-00000012").glob("shard-00002*"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    events = []
    run(tmp_path / "run", toy_config(), on_event=events.append)
    (damaged,) = [event for event in events if event["kind"] == "damaged"]
    assert (damaged["checkpoint"], damaged["step"]) == ("step-00000012", 8)
    assert damaged["reason"] == f"{shard.name} is damaged (its checksum does not match)"
    assert (tmp_path / "run/checkpoints/damaged-step-00000012").is_dir()  # nothing is lost


def test_a_signal_to_any_rank_stops_all_where_they_can_save(seen):
    for label, way in (("signalled", "fsdp=2"), ("signalled stages", "pp=2")):
        for rank in seen:
            assert rank[label]["result"]["error"] == "Interrupted"
        assert seen[0][label]["events"][-1]["kind"] == "saved"
        assert seen[0][f"{label} on"]["result"]["loss"] == seen[0][f"plain {way}"]["result"]["loss"]


@pytest.mark.parametrize("way", ["fsdp=2", "pp=2"])
@pytest.mark.parametrize("label", BROKEN)
def test_divergence_names_the_site_and_the_rank(seen, label, way, tmp_path):
    """The site that one process names."""
    one, two = (rank[f"{label} {way}"]["result"] for rank in seen)
    assert one == two
    assert one["error"] == "Diverged"
    with pytest.raises(Diverged) as alone:
        run(tmp_path, toy_config(**BROKEN[label]))
    assert re.match(rf"step {alone.value.step}: {'' if label == 'large' else 'rank [01]: '}the ", one["text"])
    assert f"site {alone.value.site}" in one["text"], str(alone.value)


def test_mistakes_are_one_error_before_anything_starts(folder, seen):
    for rank in seen:
        assert "do not run the same thing: config is" in rank["mismatched"]["result"]["text"]
        assert "30 processes and 2 were started" in rank["wrong"]["result"]["text"]
        assert "4 rows do not split into 3 micro-batches" in rank["few rows"]["result"]["text"]
        assert "parallel dp=2 has no stages" in rank["no stages"]["result"]["text"]
        assert "offload keeps the pieces of fsdp" in rank["offload of copies"]["result"]["text"]
        assert "compile is not supported with pp" in rank["compiled stages"]["result"]["text"]
        assert "--parallel dp=2 or --parallel auto" in rank["not said"]["result"]["text"]
        assert rank["wrong"]["seconds"] < 5
    assert not any(
        (folder / label).exists()
        for label in ("mismatched", "wrong", "not said", "few rows", "no stages", "compiled stages")
    )


def test_auto_says_why(seen):
    (why,) = [event["text"] for event in seen[0]["auto"]["events"] if event["kind"] == "data"]
    assert "every process can hold a copy, so dp=2" in why


def test_saving_beside_training_holds_a_step_up_for_less_than_a_tenth(seen):
    for rank in seen:
        assert rank["blocking"]["beside"] < 0.1 * rank["blocking"]["waits"], rank["blocking"]


def test_a_checkpoint_turns_into_one_file_and_back(folder, tmp_path):
    import shutil

    path = shutil.copytree(max((folder / "plain fsdp=2/checkpoints").glob("step-*")), tmp_path / "step-00000012")
    pieces = checkpoints.load(path)
    assert sharded.describe(path)["form"] == "pieces"
    sharded.rewritten(path, pieces=False)
    assert sharded.describe(path)["form"] == "one"
    whole = checkpoints.load(path)
    sharded.rewritten(path, pieces=True)
    again = checkpoints.load(path)
    for other in (whole, again):
        assert (other.step, other.info) == (pieces.step, pieces.info)
        for part, tensors in pieces.tensors.items():
            assert tensors.keys() == other.tensors[part].keys()
            assert all(tensors[name].equal(other.tensors[part][name]) for name in tensors)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
