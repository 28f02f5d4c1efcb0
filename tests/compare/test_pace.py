"""Updates of all rows timed in turn: what is measured, what a table makes of it, and what records keep."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab import figures
from residua.lab.bench import timing
from residua.lab.compare import ComparePlan, compare, pace
from residua.lab.compare.records import Records
from residua.lab.compare.results import collect
from residua.lab.compare.series import read_series
from residua.lab.compare.table import columns, legend, to_csv, to_markdown
from residua.lab.runs import FinishedRun
from tests.compare.fakes import leave
from tests.compare.inside import SMALL, inside

SIZES = [
    {"depth": 2, "width": width, "heads": 2, "tokens_per_parameter": 20, "designs": designs}
    for width, designs in ((16, ("standard", "mudd")), (32, ("standard", "mudd")), (64, ("standard",)))
]


def plan(**changes):
    given = {"designs": ["standard", "mudd"], "sizes": SIZES, "train": {"context": 16, "batch": 2, "lr": 1e-3}}
    return ComparePlan.from_json(given | changes)


TAKES = {("standard", 16): 1.0, ("mudd", 16): 1.5, ("standard", 32): 4.0, ("mudd", 32): 4.0, ("standard", 64): 9.0}
"""Seconds of an update, by the clock of the test."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that only updates move; a machine that slows down by a tenth from update to update."""
    told = {"now": 0.0, "made": 0, "slower": 1.0}

    class Updating:
        def __init__(self, config, steps, vocab):
            self.takes = TAKES[config.design, config.width]
            told["vocab"] = vocab

        def update(self):
            told["now"] += self.takes * told["slower"] ** told["made"]
            told["made"] += 1

    monkeypatch.setattr("residua.lab.compare.estimate.on_random_tokens", Updating)
    monkeypatch.setattr(timing, "now", lambda: told["now"])
    return told


def by_label(found, key):
    return {row["label"]: row[key] for row in found["rows"]}


def test_every_row_is_timed_beside_the_baseline_of_its_size(clock):
    said = []
    found = pace.measure(plan(), 300, said.append)
    assert by_label(found, "seconds") == {
        "standard | 2x16": 1.0, "mudd | 2x16": 1.5, "standard | 2x32": 4.0, "mudd | 2x32": 4.0, "standard | 2x64": 9.0,
    }  # fmt: skip
    assert found["control"] == 0
    assert clock["vocab"] == 300
    slower = {label: row and row["value"] for label, row in by_label(found, "slowdown").items()}
    assert [slower[label] for label in ("standard | 2x16", "mudd | 2x16", "mudd | 2x32")] == [None, 1.5, 1.0]
    assert pace.unresolved(found) == {"mudd | 2x32"}
    assert said == [
        "timing updates of standard | 2x16, standard | 2x32, standard | 2x64",
        "timing updates of standard | 2x16, mudd | 2x16",
        "timing updates of standard | 2x32, mudd | 2x32",
    ]


def test_machine_that_slows_down_changes_no_ratio_much_and_shows_in_the_control(clock):
    clock["slower"] = 1.01
    found = pace.measure(plan(), 300)
    assert by_label(found, "slowdown")["mudd | 2x16"]["value"] == pytest.approx(1.5, rel=0.03)
    assert 0 < found["control"] < 0.06


def test_many_rows_are_timed_in_groups(clock, monkeypatch):
    monkeypatch.setattr(pace, "GROUP", 1)
    monkeypatch.setitem(TAKES, ("delta", 16), 2.0)
    said = []
    one = plan(designs=["standard", "mudd", "delta"], sizes=[{"depth": 2, "width": 16}])
    found = pace.measure(one, 300, said.append)
    assert list(by_label(found, "seconds").values()) == [1.0, 1.5, 2.0]
    assert [text.removeprefix("timing updates of ") for text in said] == [
        "standard", "standard, mudd", "standard, delta",
    ]  # fmt: skip


def leave_runs(out, kinds=("A",)):
    """Runs by clocks that tell of nothing: every later one took twice as long."""
    one = plan()
    for number, each in enumerate(one.runs({})):
        loss = 3.0 - each.config.width / 100 - (each.variant.design == "mudd") / 10 + each.config.seed / 100
        kind = kinds[number % len(kinds)]
        leave(out / each.folder, each.config, loss, seconds=10.0 * 2**number, kind=kind)
    return one


def leave_pace(one, out, clock):
    (out / pace.PACE).write_text(json.dumps({**pace.measure(one, 300), "hardware": "Chip 1, AVX2"}))


def test_seconds_of_a_table_are_those_of_updates_timed_in_turn(tmp_path, clock):
    one = leave_runs(tmp_path)
    rough = collect(one, tmp_path)
    leave_pace(one, tmp_path, clock)
    found = collect(one, tmp_path)
    rows = {row["label"]: row for row in found["rows"]}
    assert by_label(rough, "speed")["mudd | 2x16"] == 0.125
    assert rows["mudd | 2x16"]["speed"] == pytest.approx(1 / 1.5)
    steps = one.config(one.variants()[0], 0).steps
    # when the baseline was done, mudd was at two thirds of its way, on the line between its two validations
    base, slower = (rows[f"{design} | 2x16"] for design in ("standard", "mudd"))
    assert base["loss_at_equal_time"]["mean"] == pytest.approx(base["loss"]["mean"])
    assert slower["loss_at_equal_time"]["mean"] == pytest.approx(slower["loss"]["mean"] + 1 / 3)
    drawn = figures.collect(found.series)
    assert drawn["curves"]["mudd-2x16"]["cpu_seconds"] == [0.0, pytest.approx(1.5 * steps)]
    assert [rung["cpu_seconds"] for rung in found["ladder"]["rungs"]] == [
        pytest.approx(takes * one.config(variant, 0).steps, rel=1e-5)
        for takes, variant in zip((1.0, 4.0, 9.0), (one.variants()[at] for at in (0, 2, 4)), strict=True)
    ]
    per_second, per_token = (rows["mudd | 2x32"]["speedup"][axis] for axis in ("per_cpu_second", "per_token"))
    assert per_second["factor"] > 1  # lower, and no slower
    assert per_token["factor"] > 1
    own = [[run["time"]["cpu_seconds"] for run in results["runs"]] for results in (found, rough)]
    assert own[0] == own[1]  # what the runs' clocks said stays in the file


def test_a_table_says_whose_seconds_they_are(tmp_path, clock):
    one = leave_runs(tmp_path)
    assert "speed is rough" in legend(rough := collect(one, tmp_path))
    assert not any("timed in turn" in note for note in rough["notes"])
    leave_pace(one, tmp_path, clock)
    found = collect(one, tmp_path)
    assert "speed is rough" not in legend(found)
    cells = [columns(found)["speed"](row) for row in found["rows"]]
    assert cells == ["1.00x", "0.67x", "1.00x", "n.r.", "1.00x"]
    assert "n.r.: not resolved" in legend(found)
    (note,) = (note for note in found["notes"] if "timed in turn" in note)
    assert "15 rounds or more on Chip 1, AVX2 with 1 thread, the baseline against itself within 0.0 %" in note
    assert note in to_markdown(found)
    assert ",0.66666" in to_csv(found)
    assert found["pace"]["rows"][1]["seconds"] == 1.5


def test_runs_of_two_machines_have_speeds_where_their_updates_were_timed_on_one(tmp_path, clock):
    one = leave_runs(tmp_path, kinds=("A", "B"))
    rough = collect(one, tmp_path)
    assert by_label(rough, "loss_at_equal_time")["mudd | 2x16"] is None
    assert any("there is no equal time" in note for note in rough["notes"])
    leave_pace(one, tmp_path, clock)
    found = collect(one, tmp_path)
    assert by_label(found, "speed")["mudd | 2x16"] == pytest.approx(1 / 1.5)
    assert by_label(found, "loss_at_equal_time")["mudd | 2x16"] is not None
    assert not any("there is no equal time" in note for note in found["notes"])
    assert any("memory is compared within one kind only" in note for note in found["notes"])


def test_memory_is_of_the_hardware_still():
    made = {"seed": 0, "folder": Path("a"), "result": {}, "hardware": ("A",)}
    assert FinishedRun(**made).clock == "A"
    timed = FinishedRun(**made, update_seconds=1.0)
    assert timed.clock != "A"
    assert timed.kind == "A"


def test_times_of_other_rows_are_refused(tmp_path, clock):
    one = leave_runs(tmp_path)
    leave_pace(one, tmp_path, clock)
    (tmp_path / "plan.json").write_text(json.dumps(one.to_json()))
    assert read_series(tmp_path)[0].seeds[0].update_seconds == 1.0
    path = tmp_path / pace.PACE
    path.write_text(path.read_text().replace(pace.digest_of_rows(one), "0" * 16))
    with pytest.raises(ValueError, match=r"pace\.json has the times of other rows .* --timed makes it again"):
        collect(one, tmp_path)


def test_rates_seeds_and_steps_are_no_other_rows_and_a_batch_is():
    train, same = {"context": 16, "batch": 2}, pace.digest_of_rows(plan())
    assert pace.digest_of_rows(plan(seeds=[5], train={**train, "lr": 2e-3, "residual_lr": 1e-2})) == same
    assert pace.digest_of_rows(plan(train={**train, "batch": 4})) != same
    assert pace.digest_of_rows(plan(designs=["standard", "mudd:prepost=all"], sizes=SIZES[2:])) != same


def test_records_keep_what_was_timed_and_refuse_a_changed_digit(tmp_path, clock):
    one, here, there, kept = plan(), tmp_path / "here", tmp_path / "there", tmp_path / "kept"
    for folder in (here, there):
        folder.mkdir()
    records = Records(kept, "pydoc", "bytes", dict)
    records.settle_pace(one, here, anew=False)
    assert not kept.exists()
    leave_pace(one, here, clock)
    records.settle_pace(one, here, anew=False)
    records.settle_pace(one, there, anew=False)
    assert pace.read_pace(one, there) == pace.read_pace(one, here)
    later = {**json.loads((there / pace.PACE).read_text()), "control": 0.5}
    (there / pace.PACE).write_text(json.dumps(later))
    records.settle_pace(one, there, anew=True)  # measured again: that one stays
    records.settle_pace(one, here, anew=False)
    assert pace.read_pace(one, here)["control"] == 0.5
    (path,) = (kept / "pace").glob("*.json")
    path.write_text(path.read_text().replace('"control":0.5', '"control":0.4'))
    with pytest.raises(ValueError, match=f"{path.name} was changed after it was written"):
        records.settle_pace(one, here, anew=False)


@pytest.mark.slow
def test_timed_comparison_is_made_again_from_its_records(tmp_path, monkeypatch):
    """Real updates, in the process that times them; then another machine, which times and trains nothing."""
    inside(monkeypatch, tmp_path, SMALL)
    monkeypatch.setattr("sys.argv", ["residua", "compare"])
    given = ["compare", "--plan", "plan.toml", "--out", "out", "--records", "kept", "--no-report"]
    first = CliRunner().invoke(app, [*given, "--timed"], catch_exceptions=False)
    assert first.exit_code == 0
    assert "timing updates of standard, attnres" in first.output
    found = json.loads(Path("out/results.json").read_text())["pace"]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["regime"]["threads"] == 1
    files = [Path("out", name) for name in ("results.json", "results.md", "results.csv", "figures.json")]
    made = [file.read_bytes() for file in files]
    shutil.rmtree("out")
    monkeypatch.setattr(pace, "time_rows", None)
    assert CliRunner().invoke(app, given, catch_exceptions=False).exit_code == 0
    assert [file.read_bytes() for file in files] == made


@pytest.mark.slow
def test_process_that_cannot_time_says_so(tmp_path):
    one = plan(train={"context": 16, "batch": 2, "corpus": "pydoc"}, sizes=[{"depth": 1, "width": 16, "heads": 2}])
    (tmp_path / pace.PACE).write_text("{}")
    with pytest.raises(ValueError, match=re.escape("updates could not be timed (exit code 1)")):
        pace.time_rows(one, tmp_path, -1, lambda event: None)
    assert not (tmp_path / pace.PACE).exists()


def test_updates_are_timed_here_and_not_on_a_cluster(tmp_path):
    with pytest.raises(ValueError, match="updates are timed on this machine, and --on slurm trains elsewhere"):
        compare(plan(), tmp_path / "a", on="slurm", timed=True)
    assert not (tmp_path / "a").exists()
