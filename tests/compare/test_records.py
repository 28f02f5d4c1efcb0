"""Records stand for runs: tables are made again from them byte for byte, and none is taken for another run."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.common.files import json_digest
from residua.lab.compare import compare, read_plan, records, run
from residua.lab.compare.records import Records
from residua.lab.compare.table import columns, to_markdown
from residua.lab.diagnose.condensed import condensed
from residua.lab.train import TrainConfig
from residua.lab.updates import spikes, summarise
from tests.compare.inside import Inside, write_text

PLAN = """
designs = ["standard", "attnres"]
seeds = [0, 1, 2]
sizes = [{ depth = 2, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 8
batch = 2
context = 16
eval_every = 4
eval_windows = 4
save_every = 8

[tune]
lr = [4e-3, 1e30]
seeds = [7]
"""
"""One rate of the grid diverges."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A comparison with its records, made once, in a folder of its own with everything that it read."""
    folder = tmp_path_factory.mktemp("records")
    write_text(folder / "text")
    (folder / "plan.toml").write_text(PLAN)
    with pytest.MonkeyPatch.context() as patch:
        pool = told(patch, folder)
        assert command("first").exit_code == 0
    assert len(pool.made) == 4 + 6
    return folder


@pytest.fixture
def again(place, tmp_path, monkeypatch):
    """A machine that has the text, the plan and the records, and nothing else; and its pool."""
    shutil.copytree(place / "text", tmp_path / "text")
    shutil.copytree(place / "kept", tmp_path / "kept")
    shutil.copy(place / "plan.toml", tmp_path)
    return tmp_path, told(monkeypatch, tmp_path)


def told(patch, folder):
    pool = Inside()
    patch.chdir(folder)
    patch.setenv("RESIDUA_CACHE", str(folder / "cache"))
    patch.setattr(run, "make_pool", lambda on, out: pool)
    patch.setattr("sys.argv", ["residua", "compare", "--plan", "plan.toml"])
    return pool


def command(out):
    return CliRunner().invoke(app, ["compare", "--plan", "plan.toml", "--out", out, "--records", "kept"])


def made(out):
    """The results alone."""
    return compare(read_plan(Path("plan.toml")), out, records="kept", draw=False)


def files(folder):
    """Everything that a comparison writes for a reader."""
    found = [
        *folder.glob("results.*"),
        *folder.glob("figures*"),
        *(folder / "figures").iterdir(),
        folder / "report.html",
    ]
    return {path.name: path.read_bytes() for path in found if path.is_file()}


@pytest.mark.slow
def test_tables_and_figures_are_made_again_byte_for_byte_without_training(place, again, monkeypatch):
    """Nothing is trained and no corpus is made; a plan of ten runs takes seconds."""
    folder, pool = again
    monkeypatch.setattr("residua.lab.data.tokens._encode", None)
    begun = time.monotonic()
    assert command("first").exit_code == 0
    assert time.monotonic() - begun < 60
    assert not pool.made
    before, after = files(place / "first"), files(folder / "first")
    assert {"results.json", "results.csv", "results.md", "figures.json", "report.html"} < set(before)
    assert len(before) > 8
    assert before == after
    assert not list(folder.glob("first/**/checkpoints"))


def test_records_are_small_and_one_a_run(place):
    found = list((place / "kept").glob("*.json"))
    assert len(found) == 10
    assert max(path.stat().st_size for path in found) < 8000
    values = json.loads(found[0].read_text())
    assert {"config", "result", "validations", "updates", "routing", "fingerprint", "numerics", "digest"} < set(values)
    diverged = [path for path in found if json.loads(path.read_text())["diverged"]]
    assert len(diverged) == 2  # of the rate that breaks, one a row: nobody breaks them again


@pytest.mark.parametrize("what", ["a run", "a corpus"])
def test_record_with_one_digit_changed_is_refused_by_name(again, what):
    folder, pool = again
    path = sorted((folder / "kept" / ("" if what == "a run" else "data")).glob("*.json"))[0]
    text = path.read_text()
    begun = text.index('"loss":' if what == "a run" else '"bytes":')
    where = begun + re.search(r"\d", text[begun:]).start()
    path.write_text(text[:where] + str((int(text[where]) + 1) % 10) + text[where + 1 :])
    with pytest.raises(ValueError, match=f"{path.relative_to(folder)} was changed after it was written"):
        made("second")
    assert not pool.made


def test_record_under_another_name_is_refused(again):
    folder, _ = again
    one, other = sorted((folder / "kept").glob("*.json"))[:2]
    shutil.copy(one, other)
    with pytest.raises(ValueError, match=f"{other.relative_to(folder)} holds another run than its name says"):
        made("second")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["config", "corpus", "numerics"])
def test_other_config_corpus_or_arithmetic_never_matches(again, change, monkeypatch):
    folder, pool = again
    if change == "config":
        (folder / "plan.toml").write_text(PLAN.replace("batch = 2", "batch = 3"))
    elif change == "corpus":
        (folder / "text" / "0.txt").write_text("Another text, and long enough to be one.\n")
    else:
        monkeypatch.setattr(records, "NUMERICS", 99)
    kept = len(list((folder / "kept").glob("*.json")))
    made("second")
    assert len(pool.made) == 10
    assert len(list((folder / "kept").glob("*.json"))) == kept + 10


def test_comparison_goes_on_where_another_machine_ended(again):
    """Records come from anywhere, run by run: only what is missing is made."""
    folder, pool = again
    for path in sorted((folder / "kept").glob("*.json"))[:3]:
        path.unlink()
    made("second")
    assert len(pool.made) == 3
    assert len(list((folder / "kept").glob("*.json"))) == 10


def test_runs_that_were_there_before_get_records(place, again):
    folder, pool = again
    shutil.copytree(place / "first", folder / "first")
    for path in (folder / "kept").glob("*.json"):
        path.unlink()
    made("first")
    assert not pool.made
    assert sorted(path.name for path in (folder / "kept").glob("*.json")) == sorted(
        path.name for path in (place / "kept").glob("*.json")
    )


def test_another_processor_or_build_is_said_in_the_table(again):
    folder, _ = again
    assert not {"hardware", "build"} & set(columns(made("same")))
    for path in (folder / "kept").glob("*.json"):
        values = json.loads(path.read_text())
        if values["result"] and values["config"]["design"] == "attnres":
            values.pop("digest")
            values["hardware"] = ["Elsewhere 9000, AVX2"]
            values["made_with"]["native"] = "0badf00d portable"
            records._write(path, values)
    results = made("second")
    assert {"hardware", "build"} < set(columns(results))
    shown = to_markdown(results)
    assert "Elsewhere 9000, AVX2" in shown
    assert "kernels 0badf00d portable" in shown
    assert any("their sums round differently" in note for note in results["notes"])
    assert results["rows"][1]["speed"] is None  # nothing to compare it with


def test_digest_of_the_default_config_stays():
    """Records of many hours are found by it: a field that comes later belongs into `recipe.LATER`."""
    assert TrainConfig().digest == "e4d204379c59492a"


def test_field_that_came_later_changes_the_digest_only_if_it_is_used(monkeypatch):
    used, default = TrainConfig(keep=5).digest, TrainConfig().digest
    monkeypatch.setattr("residua.lab.train.recipe.LATER", {"keep": 2})
    assert TrainConfig(keep=5).digest == used
    assert TrainConfig().digest != default
    before = {key: value for key, value in TrainConfig().to_json().items() if key != "keep"}
    assert TrainConfig().digest == json_digest(before)[:16]


def test_spikes_are_counted_where_they_begin():
    losses = [3 - i / 1000 + 0.01 * (i % 3) for i in range(400)]
    assert spikes(losses) == []
    for place in (200, 201, 202, 350):
        losses[place] += 1.0
    assert spikes(losses) == [200, 350]
    assert spikes(losses[:128]) == []
    assert spikes([1.0] * 200 + [0.2]) == []  # a loss that falls is none


def test_updates_are_summed_up_from_their_lines():
    lines = [
        {"loss": 3.0, "gradient_norm": norm, "step": step, "batch": "b"}
        for step, norm in ((1, 2.0), (2, 7.0), (3, 1.0))
    ]
    found = summarise(lines)
    assert (found["gradient_norm"], found["gradient_step"], found["spikes"], found["lines"]) == (7.0, 2, 0, 3)
    assert summarise([{**line, "batch": "c"} for line in lines])["batches"] != found["batches"]
    assert summarise([])["gradient_norm"] is None


def test_condensed_routing_has_one_cosine_a_site_and_four_digits():
    site = {
        "site": "a", "sources": ["x", "y", "z"], "stream_rms": 1.234567,
        "routing": {"cosine": [[1, 0.2, 0.3], [0.2, 1, 0.4], [0.3, 0.4, 1]], "mean_weights": [[0.123456] * 3],
                    "mean_shares": [[0.1] * 3], "max_weight": 0.5},
    }  # fmt: skip
    found = condensed({"sites": [site, {"site": "b", "sources": []}], "mean_weights": {"a": [0.123456] * 3}})
    assert found["sites"][0]["routing"] == {"cosine": 0.3, "mean_weights": [[0.1235] * 3], "max_weight": 0.5}
    assert found["sites"][0]["stream_rms"] == 1.235
    many = condensed({"sites": [{**site, "routing": {"mean_weights": [[0.1] * 3] * 1000}}], "mean_weights": {}})
    assert "mean_weights" not in many["sites"][0]["routing"]


def test_a_file_is_no_directory_of_records(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file; give a directory"):
        Records(tmp_path / "x", "pydoc", "bytes", dict)


def test_record_of_a_finished_run_replaces_a_divergence(again):
    folder, pool = again
    before = made("first")["rows"]
    ended = sorted((folder / "first/runs").glob("*/seed0"))[-1]
    (ended / "result.json").unlink()
    (ended / "diverged.json").write_text('{"step": 1, "site": "l0_mlp", "message": "nan"}')
    assert made("first")["rows"] == before
    assert not (ended / "diverged.json").exists()
    assert not pool.made
