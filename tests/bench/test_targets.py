"""Bars are judged by the files, and what a file does not hold is not called met."""

import json
from pathlib import Path

import pytest

import residua
from residua.lab.bench import plain
from residua.lab.bench.targets import gathered, judged, targets

ROOT = Path(__file__).resolve().parents[2]
SINGLE = "one read f+b of 4, 8, 16, 24, 32, 64 sources, float32, 2048x256"


def read(ratio, n=4, dtype="float32", resolved=True):
    row = {"op": "attend", "tokens": 2048, "width": 256, "n": n, "dtype": dtype}
    return row | {"both": {"ratios": {"public": {"value": ratio, "resolved": resolved}}}}


def verdicts(files):
    """What is measured of every bar, and the verdict."""
    return {row[0]: row[2:] for row in judged(files).rows}


@pytest.mark.parametrize(
    ("ratio", "resolved", "found"),
    [
        (31.0, True, ["31x (n=4)", "met"]),
        (29.9, True, ["29.9x (n=4)", "missed"]),
        (31.0, False, ["n.r. (n=4)", "not resolved"]),
    ],
)
def test_bar_of_several_rows_is_judged_by_the_worst(ratio, resolved, found):
    rows = [read(99.0, n) for n in (8, 16, 24, 32, 64)] + [read(1.0, dtype="bfloat16")]
    assert verdicts({"ops": {"rows": [*rows, read(ratio, resolved=resolved)]}})[SINGLE] == found
    assert verdicts({"ops": {"rows": rows}})[SINGLE] == ["-", "not measured"]


def test_step_is_judged_by_itself_and_its_control_by_another_bar():
    model = {"ratios": {"delta": {"value": 1.09, "control": 0.02}, "ddl": {"value": 1.03}}, "control": 0.02}
    found = verdicts({"model": model})
    assert found["training step, delta"] == ["1.09x", "missed"]
    assert found["training step, ddl"] == ["1.03x", "met"]
    assert found["training step, mudd"] == ["-", "not measured"]
    assert found["standard against itself (A/A)"] == ["2 %", "missed"]


def test_plain_step_needs_every_shape():
    rows = [
        {"depth": depth, "width": width, "context": context, "phase": "step", "of_fastest": 0.85 + width / 1e4}
        for depth, width in plain.SHAPES for context in plain.CONTEXTS
    ]  # fmt: skip
    what = "plain step, of the fastest rival, every shape"
    assert verdicts({"plain": {"rows": rows}})[what] == ["0.9268x (12 x 768, 128)", "missed"]
    assert verdicts({"plain": {"rows": rows[1:]}})[what] == ["-", "not measured"]


def test_compiled_step_needs_every_design_and_is_given_the_control():
    designs = [
        {"design": name, "ratios": {"compiled": {"value": 1.01, "control": 0.02 if name != "mhc" else 0.0}}}
        for name in residua.names()
    ]
    what = "compiled step over eager, less the control, every design"
    assert verdicts({"compiled": {"designs": designs}})[what] == ["1.01x (mhc)", "missed"]
    assert verdicts({"compiled": {"designs": designs[:-1]}})[what] == ["-", "not measured"]


def test_groups_are_a_share_of_the_matrix_product():
    parts = [{"part": "group of reads, forward", "seconds": 2.0, "multiplies": 170}]
    files = {"profile": {"multiplies_per_second": 100, "forms": [{"parts": parts}]}}
    assert verdicts(files)["groups of reads, forward, of a matrix product's rate"] == ["85 %", "met"]


def test_nothing_measured_is_nothing_met():
    assert {row[3] for row in judged({}).rows} == {"not measured"}
    assert len({target.what for target in targets()}) == len(list(targets()))


def test_files_of_one_kind_are_one_list(tmp_path):
    for name, counts in (("ops", (4, 8, 16)), ("ops-more", (24, 32, 64))):
        measured = {"rows": [read(30.0 + n, n) for n in counts], "growth": {name: 1}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": 1, "ops": measured}))
    assert verdicts(gathered(tmp_path))[SINGLE] == ["34x (n=4)", "met"]


def test_committed_files_hold_every_bar_and_every_design():
    files = gathered(ROOT / "results" / "bench")
    assert not [row[0] for row in judged(files).rows if row[3] == "not measured"]
    assert {*residua.names()} - {"standard"} <= files["model"]["ratios"].keys()
