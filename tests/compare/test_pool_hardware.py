"""Runs of different machines in one table: each carries its hardware, and speed is compared within one kind."""

import json

import pytest

from residua.lab.compare import ComparePlan
from residua.lab.compare.results import collect
from residua.lab.compare.table import columns, to_csv, to_markdown
from residua.lab.compare.work import DONE, Work
from residua.lab.compare.worker import attempt
from residua.lab.runs import read_run
from tests.compare.test_results import SMALL, write_run

FAST, SLOW = "a fast device", "a slow device"


def made(out, *kinds):
    """Two designs, two seeds each, in the plan's order: the hardware of every run. A fast one takes half the time."""
    plan = ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], "seeds": [0, 1], **SMALL})
    for run, kind in zip(plan.runs({}), kinds, strict=True):
        seconds = (10.0 if run.variant.design == "standard" else 12.5) * (0.5 if FAST in kind else 1.0)
        write_run(out / run.folder, 3.0, seconds=seconds, memory=100)
        (out / run.folder / "hardware.json").write_text(json.dumps({"kinds": kind}))
    return collect(plan, out)


def test_one_kind_is_compared_as_ever(tmp_path):
    results = made(tmp_path, *[[SLOW]] * 4)
    assert results["rows"][1]["speed"] == pytest.approx(0.8)
    assert results["rows"][1]["loss_at_equal_time"] is not None
    assert "hardware" not in columns(results)
    assert not any("hardware" in note for note in results["notes"])
    assert [run["hardware"] for run in results["runs"]] == [[SLOW]] * 4


def test_speed_is_compared_within_a_kind(tmp_path):
    """The design ran twice on the fast device and the baseline once: the device's speed is not the design's."""
    results = made(tmp_path, [FAST], [SLOW], [FAST], [FAST])
    base, own = results["rows"]
    assert own["speed"] == pytest.approx(0.8)
    assert own["memory"] == pytest.approx(1.0)
    assert base["speed"] == pytest.approx(1.0)
    assert base["loss_at_equal_time"] is own["loss_at_equal_time"] is None
    assert (base["hardware"], own["hardware"]) == (f"{FAST}; {SLOW}", FAST)
    assert any(f"2 kinds of hardware ({FAST}; {SLOW})" in note for note in results["notes"])


def test_rows_without_a_common_kind_have_no_speed(tmp_path):
    results = made(tmp_path, [SLOW], [SLOW], [FAST], [FAST])
    assert results["rows"][1]["speed"] is results["rows"][1]["memory"] is None
    assert results["rows"][1]["difference"] is not None  # losses compare wherever they were made
    assert f"| {FAST} |" in to_markdown(results)
    assert "hardware" in to_csv(results).splitlines()[0]
    assert "loss_at_equal_time_mean" in to_csv(results).splitlines()[0]


def test_run_that_moved_counts_for_no_kind(tmp_path):
    """Half of its time was spent on each: its seed is left out of the speeds."""
    results = made(tmp_path, [SLOW], [SLOW], [SLOW], [SLOW, FAST])
    assert results["rows"][1]["speed"] == pytest.approx(0.8)
    assert results["rows"][1]["hardware"] == f"{SLOW}; {FAST}"


def test_worker_writes_down_what_it_ran_on(tmp_path, monkeypatch):
    """In the run's folder, every kind once."""
    from residua.lab.compare import worker

    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(f"{number}word{place}" for place in range(40)))
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    plan = ComparePlan.from_json(
        {"designs": ["standard"], "seeds": [0], "sizes": [{"depth": 1, "width": 8, "heads": 1}],
         "train": {"steps": 2, "context": 8, "batch": 1, "eval_windows": 1, "corpus": f"dir:{tmp_path / 'text'}"}}
    )  # fmt: skip
    work = Work(tmp_path / "run.json", tmp_path / "run")
    work.job.write_text(json.dumps(plan.runs({})[0].config.to_json()))
    monkeypatch.setattr(worker, "hardware", lambda device: f"a {device.type}")
    assert attempt(work) == (DONE, "")
    assert work.ended() == (DONE, "")
    assert read_run(work.folder, 0).hardware == ["a cpu"]
    assert attempt(work) == (DONE, "")
    assert read_run(work.folder, 0).kind == "a cpu"
