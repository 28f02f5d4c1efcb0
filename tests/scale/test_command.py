"""The command line: `torchrun -m residua train --parallel ...`, what it refuses, and `residua checkpoint`."""

from __future__ import annotations

import json
import subprocess

import pytest

from residua.lab import report
from residua.lab.common.files import read_json
from tests.refusals.harness import residua
from tests.scale.common import ROOT, environment, torchrun
from tests.train.harness import metrics, run

pytestmark = pytest.mark.slow
FLAGS = [
    "train", "--corpus", f"dir:{ROOT / 'docs'}", "--steps", "4", "--batch", "4", "--context", "16", "--width", "16",
    "--design", "delta", "--depth", "2", "--heads", "2", "--eval-every", "2", "--save-every", "2",
]  # fmt: skip


def test_ranks_are_started_by_torchrun(tmp_path):
    done = residua(*FLAGS, "--parallel", "fsdp=2", "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert done.err.strip() == (
        "residua: parallel fsdp=2 takes 2 processes; start them with torchrun --nproc-per-node 2 -m residua train ..."
    )


def test_train_under_torchrun_prints_once(tmp_path):
    flags = ["--parallel", "pp=2", "--schedule", "gpipe", "--out", str(tmp_path / "two"), "--json"]
    done = subprocess.run(
        [*torchrun(2), "-m", "residua", *FLAGS, *flags],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)  # one document: rank 0's
    assert result == read_json(tmp_path / "two/result.json")
    assert done.stderr.count("on 2 ranks (pp=2)") == 1
    assert read_json(tmp_path / "two/manifest.json")["ranks"][0]["pipeline"].startswith("gpipe, 4 micro-batches")
    alone = residua(*FLAGS, "--out", str(tmp_path / "one"), "--json")
    assert alone.code == 0, alone.err
    for here, there in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert here.get("batch") == there.get("batch")
        assert there["loss"] == pytest.approx(here["loss"], abs=1e-5)
    one, two = (report.gather(tmp_path / name, prompt="a stream") for name in ("one", "two"))
    assert shape(one) == shape(two)  # the page of one process, from the pieces of two


def shape(page):
    """Every key of a page's data, and how long its lists are."""
    if isinstance(page, dict):
        return {key: shape(value) for key, value in page.items()}
    return [shape(each) for each in page] if isinstance(page, list) else type(page).__name__


def test_checkpoints_are_listed_and_rewritten(tmp_path):
    run(tmp_path)
    listed = json.loads(residua("checkpoint", str(tmp_path), "--json").out)
    assert [(each["step"], each["form"], each["ranks"]) for each in listed] == [(8, "one", 1), (12, "one", 1)]
    done = residua("checkpoint", str(tmp_path), "--form", "pieces")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith("step-00000012  sharded over 1 ranks, ")
    wrong = residua("checkpoint", str(tmp_path), "--form", "two")
    assert (wrong.code, wrong.err.strip()) == (2, "residua: --form is one or pieces, not 'two'")
