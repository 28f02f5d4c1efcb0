"""Copies of a sharded model (HSDP), of a split one, a split one that is sharded, and stages, on four processes, are one
process."""

from __future__ import annotations

import pytest

from residua.lab.common.files import read_json
from residua.lab.train import load_model
from tests.scale.common import DEEP, FOUR, TOLERANCE, in_float64, launch, once
from tests.train.harness import metrics, run, toy_config

pytestmark = pytest.mark.slow
LAYOUTS = ("dp=2,fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "on_four", lambda out: launch("on_four", 4, out))


@pytest.fixture(scope="module")
def found(folder):
    return read_json(folder / "on_four.json")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_axes_are_one_process(found, layout):
    for off in found[layout].values():
        assert "error" not in off, off
        assert max(off["logits"], off["gradient"], off["loss"]) <= TOLERANCE, off


def test_split_and_sharded_it_starts_as_the_whole_model(found):
    assert found["start"] == []


def test_routing_is_recorded_of_a_sharded_model(found):
    for seen in found["routing"].values():
        assert seen["sharded"].keys() == seen["whole"].keys()
        for key, value in seen["whole"].items():
            near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert seen["sharded"][key] == near, key


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    with in_float64():
        run(out, toy_config(**DEEP))
    return out


@pytest.mark.parametrize("name", FOUR)
def test_runs_on_four_ranks_are_the_run_of_one_process(found, folder, one, name):
    for here, there in zip(metrics(one), metrics(folder / name), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=TOLERANCE)
        if "gradient_norm" in here:
            assert there["gradient_norm"] == pytest.approx(here["gradient_norm"], rel=TOLERANCE)
        for site, value in here.get("stream_rms", {}).items():
            assert there["stream_rms"][site] == pytest.approx(value, rel=1e-6)  # its squares are float32
    right, four = load_model(one).state_dict(), load_model(folder / name).state_dict()
    assert max(float((right[key] - four[key]).abs().max()) for key in right) < 1e-6  # read back as float32


def test_a_sharded_stage_saves_its_pieces(folder):
    last = max((folder / "pp=2,fsdp=2/checkpoints").glob("step-*"))
    state = read_json(last / "state.json")
    assert (state["format"], state["ranks"]) == (2, 4)
    assert len(list(last.glob("shard-*.safetensors"))) == 4
    assert read_json(folder / "pp=2,fsdp=2/manifest.json")["ranks"] == [
        {"processes": 4, "parallel": "pp=2,fsdp=2", "pipeline": "interleaved, 4 micro-batches, 2 stages a rank"}
    ]
