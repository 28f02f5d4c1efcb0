"""Bars are judged by the files, and what a file does not hold is not called met."""

import json
from pathlib import Path

import pytest

from residua.lab.bench.targets import gathered, judged, targets

ROOT = Path(__file__).resolve().parents[2]


def read(ratio, n=4, dtype="float32", resolved=True):
    row = {"op": "attend", "tokens": 2048, "width": 256, "n": n, "dtype": dtype}
    return row | {"both": {"ratios": {"public": {"value": ratio, "resolved": resolved}}}}


@pytest.mark.parametrize(
    ("ratio", "resolved", "verdict"), [(26.0, True, "met"), (24.9, True, "missed"), (26.0, False, "not resolved")]
)
def test_bar_is_judged_by_the_row_it_names(ratio, resolved, verdict):
    files = {"ops": {"rows": [read(99.0, n=8), read(99.0, dtype="bfloat16"), read(ratio, resolved=resolved)]}}
    found = {row[0]: row[3] for row in judged(files).rows}
    assert found["one read f+b, float32, n=4, 2048x256"] == verdict
    assert found["one read f+b, float32, n=16, 2048x256"] == "not measured"


@pytest.mark.parametrize(("resolved", "verdict"), [(True, "missed"), (False, "not measured")])
def test_unresolved_step_is_judged_by_its_machinery(resolved, verdict):
    model = {"resolved": resolved, "ratios": {"delta": {"value": 1.2, "control": 0.01}}, "machinery": {"delta": 0.06}}
    found = {row[0]: row[3] for row in judged({"model": model}).rows}
    assert found["training step, delta, less the control"] == verdict
    assert found["its machinery, delta, where no step is resolved"] == "met"


def test_nothing_measured_is_nothing_met():
    assert {row[3] for row in judged({}).rows} == {"not measured"}
    assert len({target.what for target in targets()}) == len(list(targets()))


def test_files_of_one_kind_are_one_list(tmp_path):
    for name, ratio in (("ops", 30.0), ("ops-more", 20.0)):
        measured = {"rows": [read(ratio, n=4 if name == "ops" else 8)], "growth": {name: 1}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": 1, "ops": measured}))
    found = {row[0]: row[3] for row in judged(gathered(tmp_path)).rows}
    assert found["one read f+b, float32, n=4, 2048x256"] == "met"
    assert found["one read f+b, float32, n=8, 2048x256"] == "missed"


def test_committed_files_hold_every_bar():
    assert "not measured" not in {row[3] for row in judged(gathered(ROOT / "results" / "bench")).rows}
