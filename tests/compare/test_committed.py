"""Tables, figures and pages that are committed with their records are those that the records give, to the last byte."""

import importlib.machinery
import importlib.util
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
from tests.compare.inside import Inside, write_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def publisher():
    """tools/publish, as a module."""
    loader = importlib.machinery.SourceFileLoader("publish", str(ROOT / "tools" / "publish"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("publish", loader))
    loader.exec_module(module)
    return module


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
        assert publisher().unasked(read_plan(ROOT / "recipes" / f"{kept.parent.name}.toml"), out, kept) == []


PLAN = """
designs = ["standard", "attnres"]
seeds = [0, 1]
sizes = [{ depth = 1, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 2
batch = 2
context = 16
eval_windows = 2
"""


def test_changed_table_is_told_from_that_of_its_records(tmp_path, monkeypatch):
    """What the test above would say of a committed digit that no record has."""
    write_text(tmp_path / "text")
    (tmp_path / "plan.toml").write_text(PLAN)
    folder, pool = tmp_path / "results" / "mine", Inside()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
        patch.setattr(run, "make_pool", lambda on, out: pool)
        given = ["compare", "--plan", "plan.toml", "--out", "out", "--records", str(folder / "records"), "--no-report"]
        assert CliRunner().invoke(app, given).exit_code == 0
    for path in (*(tmp_path / "out").glob("results.*"), tmp_path / "out" / "figures.json"):
        shutil.copy(path, folder)
    assert stale(folder, tmp_path / "again", monkeypatch) == []
    table = (folder / "results.md").read_text()
    (folder / "results.md").write_text(table.replace("1.00x", "1.01x", 1))
    assert stale(folder, tmp_path / "third", monkeypatch) == ["results.md"]


def test_records_that_no_plan_asks_for_are_found(tmp_path, monkeypatch):
    """As those of a rate that left the grid, which would lie there for ever."""
    write_text(tmp_path / "text")
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "make_pool", lambda on, out: Inside())
    plan, kept = read_plan(Path("plan.toml")), Path("records")
    compare(plan, Path("out"), records=kept)
    assert publisher().unasked(plan, Path("out"), kept) == []
    fewer = replace(plan, seeds=(1,))
    others = publisher().unasked(fewer, Path("out"), kept)
    assert {json.loads(path.read_text())["config"]["seed"] for path in others} == {0}
    assert len(others) == len(plan.variants())
