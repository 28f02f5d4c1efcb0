"""What a pair of processes is refused: another version of the code on one of them, and `residua finetune`."""

from __future__ import annotations

import json
import subprocess

import pytest

from residua.lab.finetune import FinetuneConfig, finetune
from tests.scale.common import ROOT, environment, torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    out = tmp_path_factory.mktemp("refusals")
    done = subprocess.run(
        [*torchrun(2), "-m", "tests.scale.on_refusals", str(out / "said")],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert (out / "said.1").exists(), done.stderr[-3000:]
    return out, done.stderr


def test_a_rank_with_another_version_of_the_code_is_refused_by_all(refused):
    out, _ = refused
    for rank in range(2):
        said = json.loads((out / f"said.{rank}").read_text())["code"]
        assert "the ranks do not run the same thing: source is '" in said
        assert said.count("source is") == 1
        assert "on rank 0 and '" in said
        assert said.endswith("' on rank 1")
    assert not (out / "run").exists()


def test_finetune_on_several_processes_is_one_line_that_names_the_trainer(refused):
    out, errors = refused
    (line,) = [line for line in errors.splitlines() if line.startswith("residua: ")]
    assert "start it without torchrun and --parallel, or use transformers' Trainer under torchrun" in line
    assert not (out / "tuned").exists()


def test_finetune_in_python_refuses_as_well(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="use transformers' Trainer under torchrun"):
        finetune(FinetuneConfig(checkpoint="no/such/model"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
