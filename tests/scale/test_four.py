"""Copies of a sharded model (HSDP) and copies of a split one, on four processes, are one process."""

from __future__ import annotations

import pytest

from residua.lab.common.files import read_json
from residua.lab.train import load_model
from tests.scale.common import TOLERANCE, launch, once
from tests.train.harness import metrics, run, toy_config

pytestmark = pytest.mark.slow
LAYOUTS = ("dp=2,fsdp=2", "dp=2,tp=2")


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


def test_routing_is_recorded_of_a_sharded_model(found):
    for seen in found["routing"].values():
        assert seen["sharded"].keys() == seen["whole"].keys()
        for key, value in seen["whole"].items():
            near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert seen["sharded"][key] == near, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_on_two_axes_are_the_run_of_one_process(found, folder, layout, tmp_path):
    run(tmp_path, toy_config())
    for here, there in zip(metrics(tmp_path), metrics(folder / layout), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5)
    one, four = load_model(tmp_path).state_dict(), load_model(folder / layout).state_dict()
    assert max(float((one[name] - four[name]).abs().max()) for name in one) < 5e-5
