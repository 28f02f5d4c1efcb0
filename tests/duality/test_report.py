"""`residua duality` says what is so: it passes on models as they are, and fails as soon as one side is changed."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from residua import ops
from residua.cli import app
from residua.lab import duality
from residua.lab.duality import checks, reads
from residua.lab.duality.report import OBJECTIONS, as_markdown, summary
from residua.model import ModelConfig, Transformer

ROOT = Path(__file__).resolve().parents[2]


def moved(design, **changes):
    """A model whose weights have left their start, as training would move them."""
    settings = {"vocab": 23, "width": 16, "depth": 4, "heads": 2, "mlp_width": 24, "init_std": 0.3}
    model = Transformer(ModelConfig(**(settings | changes), design=design))
    with torch.no_grad():
        for parameter in model.stream.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return duality.subject(f"moved {design}", model)


MOVED = {
    "states": "depthswa",
    "deltas": "depthswa:window=3,sources=deltas,unit=sublayer,enter=add,heads=2,key_norm=true",
    "other design": "mudd",
    "stream": "depthswa:enter=stream",
    "apart": "depthswa:shared=false",
    "one source": "depthswa:window=1",
}


@cache
def subject(name):
    return duality.random_subject(0, width=16, depth=4) if name == "random" else moved(MOVED[name])


@pytest.mark.parametrize("name", ["random", *MOVED])
def test_report_passes_on_every_kind_of_model(name):
    report = duality.examine([subject(name)])
    assert report["passed"], [row for row in report["rows"] if not row["passed"]]
    sources = len(subject(name).given.stack)
    windows = {(row["window"], row["dtype"]) for row in report["rows"] if row["part"] == "theorem"}
    assert windows == {(w, t) for w in range(1, sources + 1) for t in ("float64", "float32")}
    quantities = {row["quantity"] for row in report["rows"] if row["part"] == "theorem"}
    assert quantities == {"output", "stack", "W_Q", "W_K", "W_V"}
    broken = {row["what"] for row in report["rows"] if row["part"] == "condition"}
    assert len(broken) == len(checks.BROKEN) + 2  # feedback, and none
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("name", ["states", "deltas"])
def test_report_looks_at_the_reads_inside_the_network(name):
    (row,) = checks.network(subject(name))
    assert row.passed
    (wrong,) = checks.network(replace(subject(name), window=2))
    assert not wrong.passed  # it is this window's read and no other's


def test_report_fails_where_the_equality_does(monkeypatch):
    """A sequence side that looks one token further is caught in the outputs and in every gradient."""
    right = reads.over_sequence
    monkeypatch.setattr(checks, "over_sequence", lambda given, window, **more: right(given, window + 1, **more))
    rows = [row for row in checks.theorem(subject("random")) if row.window == 2]
    assert not any(row.passed for row in rows)
    report = duality.examine([subject("random")])
    assert not report["passed"]
    settled = {one["shown_by"]: one["passed"] for one in report["settles"]}
    assert not settled["theorem"]
    assert settled["reduction"]


def test_report_fails_where_a_broken_condition_changes_nothing(monkeypatch):
    monkeypatch.setitem(checks.BROKEN, "nothing at all", lambda given, window: checks.over_sequence(given, window))
    rows = {row.what: row.passed for row in checks.conditions(subject("random"))}
    assert rows.pop("nothing at all") is False
    assert all(rows.values())


def test_gradients_that_are_nothing_are_judged_beside_those_that_are_not():
    """A window of one has weight 1 whatever W_Q and W_K are."""
    given = subject("random").given
    found = reads.with_gradients(reads.over_sequence, given, 1)
    assert found["W_Q"].abs().max() < 1e-12
    assert max(reads.gaps(reads.over_depth, reads.over_sequence, given, 1).values()) < 1e-12


def test_both_axes_are_one_operator_on_any_backend():
    for backend in ("reference", "auto"):
        with ops.backend(backend):
            gaps = reads.gaps(checks._along_axis_zero, reads.over_depth, subject("random").given, 3)
        assert max(gaps.values()) < 1e-12


def test_summary_takes_the_worst_row():
    report = duality.examine([subject("random"), subject("states")])
    for row in summary(report):
        rows = [one for one in report["rows"] if (one["what"], one["dtype"]) == (row["what"], row["dtype"])]
        assert row["error"] == (max if row["equal"] else min)(one["error"] for one in rows)
        assert row["count"] == len(rows)
    text = as_markdown(report)
    assert all(one.asked in text for one in OBJECTIONS)
    assert "FAIL" not in text


def run(*arguments):
    return CliRunner().invoke(app, ["duality", *map(str, arguments)])


@pytest.mark.slow  # trains three models
def test_command_trains_three_models_and_exits_with_0(tmp_path):
    words = ["stream", "read", "written", "site", "layer", "window", "depth", "token", "axis", "source", "state"]
    for part in range(40):  # documents that differ enough not to be dropped as copies
        lines = [" ".join(words[(i * (part + 2) + j * j) % len(words)] for j in range(9)) for i in range(60)]
        (tmp_path / f"{part}.txt").write_text(f"part {part}\n" + "\n".join(lines))
    file = tmp_path / "out" / "duality.json"
    done = run("--steps", 8, "--corpus", f"file:{tmp_path}/*.txt", "--seeds", 1, "--out", file, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report == json.loads(file.read_text())
    assert sum(model["trained"] for model in report["models"]) == 3
    assert "Objections to the paper" in as_markdown(report)


def test_command_exits_with_1_on_failure(monkeypatch):
    monkeypatch.setattr(duality, "trained_subjects", lambda **_: [subject("states")])
    assert run("--seeds", 1).exit_code == 0
    right = reads.over_sequence
    monkeypatch.setattr(checks, "over_sequence", lambda given, window, **more: 1.001 * right(given, window, **more))
    failed = run("--seeds", 1)
    assert failed.exit_code == 1
    assert "FAIL" in failed.stdout


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("--json", "--markdown"), "exclude each other; give one"),
        (("--steps", "0"), "at least 1"),
        (("--run", "nowhere"), "no config.json"),
        (("--out", "."), "--out takes a file"),
    ],
    ids=str,
)
def test_command_refuses_wrong_input(arguments, cure):
    failed = run(*arguments)
    assert isinstance(failed.exception, ValueError)
    assert cure in str(failed.exception)


def test_page_shows_what_the_results_file_says():
    report = json.loads((ROOT / "results" / "duality" / "duality.json").read_text())
    assert report["passed"]
    assert sum(model["trained"] for model in report["models"]) >= 3
    page = (ROOT / "docs" / "duality.md").read_text()
    assert as_markdown(report) in page
    assert report["command"] in page


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_conditions_are_seen_in_shallow_models_too(depth):
    """A mask that is no other one in so short a stack is not tried; every other break is seen."""
    rows = list(checks.conditions(duality.random_subject(0, width=16, depth=depth)))
    assert [row.what for row in rows if not row.passed] == []
    masks = {row.what for row in rows} & set(checks.MASKS)
    assert masks == (set() if depth == 1 else set(checks.MASKS))
