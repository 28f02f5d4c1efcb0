"""Tables, figures and pages that are committed with their records are those that the records give, to the last byte."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab import data, report
from residua.lab.compare import ComparePlan, compare, read_plan, records, run
from residua.lab.compare.pool import Pool
from tests.compare.inside import SMALL, inside
from tests.tools import tool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Nobody(Pool):
    """A machine that trains nothing."""

    def start(self, work):
        raise AssertionError(f"{work.folder} has no record, and the table was made of it")


def stale(folder, out, patch):
    """Which files in a folder of results are not those that its records give; wherever the text is, for its manifest
    lies beside the records."""
    was, kept = json.loads((folder / "results.json").read_text()), folder / "records"
    texts = {json.loads(path.read_text())["manifest"]["fingerprint"]: path for path in kept.glob("data/*.json")}
    key = texts[was["fingerprints"][0]].stem
    patch.setattr(run, "make_pool", lambda on, out: Nobody())
    patch.setattr(data, "check_data", lambda *_: None)
    patch.setattr(records, "data_key", lambda *_: key)
    plan = ComparePlan.from_json(was["plan"])
    results = compare(plan, out, records=kept, so_far="unfinished" in was, command=was["command"])
    report.write(out, read=results.series, checkpoints=False)
    made = {path.name: path for path in (*out.iterdir(), *(out / "figures").iterdir())}
    shown = [path for path in folder.iterdir() if path.suffix in (".json", ".csv", ".md", ".svg", ".html")]
    return [path.name for path in shown if made[path.name].read_bytes() != path.read_bytes()]


def test_committed_tables_are_made_again_from_their_records(tmp_path, monkeypatch):
    """In under a minute each, and the plan asks for every record; records of an experiment without a table wait for the
    rest of its recipe."""
    monkeypatch.chdir(tmp_path)  # a page names the folder that it was made in
    for kept in sorted((ROOT / "results").glob("*/records")):
        if not (kept.parent / "results.json").exists():
            assert (ROOT / "recipes" / f"{kept.parent.name}.toml").exists()
            continue
        begun, out = time.process_time(), Path("runs") / kept.parent.name
        assert stale(kept.parent, out, monkeypatch) == []
        assert time.process_time() - begun < 60
        publish, plan = tool("publish"), read_plan(ROOT / "recipes" / f"{kept.parent.name}.toml")
        if (kept.parent / publish.FINISHED).exists():
            assert publish.held(kept).keys() == publish.asked(plan, out)


CHECKED = """
designs = ["standard"]
seeds = [0]
sizes = [{ depth = 1, width = 16, heads = 2 }, { depth = 1, width = 24, heads = 2 }]

[train]
corpus = "dir:text"
steps = 2
batch = 2
context = 16
eval_windows = 2

[tune]
lr = [1e-3, 2e-3]
seeds = [7]
carry = "width"
check = "1x24"
"""


def test_changed_table_is_told_from_that_of_its_records(tmp_path, monkeypatch):
    """What the test above would say of a committed digit that no record has."""
    folder = tmp_path / "results" / "mine"
    with monkeypatch.context() as patch:
        inside(patch, tmp_path, SMALL)
        given = ["compare", "--plan", "plan.toml", "--out", "out", "--records", str(folder / "records"), "--no-report"]
        assert CliRunner().invoke(app, given).exit_code == 0
    for path in (*(tmp_path / "out").glob("results.*"), tmp_path / "out" / "figures.json"):
        shutil.copy(path, folder)
    assert stale(folder, tmp_path / "again", monkeypatch) == []
    table = (folder / "results.md").read_text()
    (folder / "results.md").write_text(table.replace("1.00x", "1.01x", 1))
    assert stale(folder, tmp_path / "third", monkeypatch) == ["results.md"]


def test_every_run_of_a_plan_is_one_that_its_records_are_kept_for(tmp_path, monkeypatch):
    """Trials, checks of the rule and reported runs; those of a seed that left the plan are not."""
    inside(monkeypatch, tmp_path, CHECKED)
    plan, out, kept, publish = read_plan(Path("plan.toml")), Path("out"), Path("records"), tool("publish")
    compare(plan, out, records=kept)
    held = publish.held(kept)
    assert held.keys() == publish.asked(plan, out)
    configs = {digest: json.loads(path.read_text())["config"] for digest, path in held.items()}
    assert {(config["width"], config["seed"]) for config in configs.values()} == {(16, 7), (16, 0), (24, 7), (24, 0)}
    others = held.keys() - publish.asked(replace(plan, seeds=(1,)), out)
    assert {configs[digest]["seed"] for digest in others} == {0}
    assert len(others) == len(plan.variants())
