"""A plan that is not done: the order of its runs, the table of those that are there, and the end of its time."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab import plots
from residua.lab.compare import ComparePlan, compare, run
from residua.lab.compare import execute as executing
from residua.lab.compare.choice import choose_rates
from residua.lab.compare.execute import TimeIsUp, deadline_after, execute
from residua.lab.compare.results import collect
from residua.lab.compare.run import in_passes
from residua.lab.compare.table import columns, to_csv, to_markdown
from residua.lab.compare.verdict import verdict
from tests.compare.fakes import break_run, leave
from tests.compare.inside import Inside, write_text
from tests.compare.test_pool import Fake

GIVEN = {
    "designs": ["standard", "attnres", "mudd"],
    "sizes": [{"depth": 2, "width": width, "heads": 2} for width in (16, 32)],
    "seeds": [0, 1, 2, 3],
    "train": {"context": 16, "batch": 2, "steps": 4},
    "tune": {"lr": [1e-3, 2e-3], "seeds": [100], "carry": "width", "check": "2x32", "check_designs": ["standard"]},
}


def plan(**changes):
    return ComparePlan.from_json(GIVEN | changes)


def loss_of(config):
    draw = np.random.default_rng([config.seed, config.width, len(config.design)])
    gap = {"standard": 0.0, "attnres": -0.3, "mudd": 0.0}[config.design]
    return 3 + config.seed / 10 + gap + draw.normal(0, 0.01)


def begin(out, one, runs, *, rows=("standard", "attnres", "mudd")):
    """Tuned rows, and the first `runs` of the reported ones in the order in which they are made."""
    for trial in one.tuning():
        if trial.variant.design in rows:
            leave(out / trial.folder, trial.config, 3 + trial.config.lr)
    for each in in_passes(one, one.runs(choose_rates(one, out)))[:runs]:
        leave(out / each.folder, each.config, loss_of(each.config))


def test_runs_are_made_size_by_size_and_there_seed_by_seed():
    """After every pass all rows of a size have equally many seeds; the baseline is first though it is listed last."""
    one = plan(baseline="mudd", sizes=[GIVEN["sizes"][0], {**GIVEN["sizes"][1], "seeds": 2}])
    made = [(str(each.variant.size), each.config.seed, each.variant.design) for each in in_passes(one, one.runs({}))]
    rows = ("mudd", "standard", "attnres")
    assert made == [
        (size, seed, row) for size, seeds in (("2x16", range(4)), ("2x32", range(2))) for seed in seeds for row in rows
    ]


@pytest.fixture
def order(monkeypatch):
    """The kind and size of every run that a comparison would make; all end with the same loss."""
    order = []

    def execute(runs, out, **_):
        for each in runs:
            if not (out / each.folder / "result.json").exists():
                order.append(each.folder.split("/")[0] + " " + str(each.variant.size))
                leave(out / each.folder, each.config, 3.0)

    data = type("Data", (), {"manifest": {"fingerprint": "f" * 64, "tokens": {"train": 1000}}})
    monkeypatch.setattr(run, "execute", execute)
    monkeypatch.setattr("residua.lab.data.prepare", lambda *_, **__: data)
    return order


def test_rule_is_checked_between_the_first_size_and_the_others(tmp_path, order):
    compare(plan(), tmp_path, draw=False)
    assert list(dict.fromkeys(order)) == ["tune 2x16", "runs 2x16", "check 2x32", "runs 2x32"]
    assert len(order) == 6 + 12 + 3 + 12


def test_without_a_rule_every_size_is_tuned_and_then_trained(tmp_path, order):
    compare(plan(tune={"lr": [1e-3, 2e-3], "seeds": [100]}), tmp_path, draw=False)
    assert list(dict.fromkeys(order)) == ["tune 2x16", "runs 2x16", "tune 2x32", "runs 2x32"]
    assert len(order) == 6 + 12 + 6 + 12


def test_table_so_far_pairs_the_seeds_that_are_there(tmp_path):
    """Three passes of the first size and the baseline of the fourth: three pairs a row, and nothing of the second."""
    one = plan()
    begin(tmp_path, one, 10)
    with pytest.raises(ValueError, match=r"attnres \| 2x16 has 3 of 4 seeds; finish the comparison first"):
        collect(one, tmp_path)
    results = collect(one, tmp_path, so_far=True, command="residua compare --plan x.toml --out a --so-far")
    assert [row["label"] for row in results["rows"]] == [f"{row} | 2x16" for row in GIVEN["designs"]]
    assert [row["loss"]["seeds"] for row in results["rows"]] == [4, 3, 3]
    gaps = [
        run["loss"] - base["loss"]
        for run, base in zip(
            *(
                [each for each in results["runs"] if each["label"] == f"{row} | 2x16"]
                for row in ("attnres", "standard")
            ),
            strict=False,
        )
    ]
    assert results["rows"][1]["difference"]["mean"] == pytest.approx(np.mean(gaps))
    assert results["rows"][1]["difference"]["seeds"] == 3
    assert results["rows"][1]["difference"]["significant"]
    assert (results["unfinished"]["runs"], results["unfinished"]["of"]) == (10, 24)
    assert {row["label"]: (row["seeds"], row["of"]) for row in results["unfinished"]["rows"]} == {
        "attnres | 2x16": (3, 4), "mudd | 2x16": (3, 4),
        "standard | 2x32": (0, 4), "attnres | 2x32": (0, 4), "mudd | 2x32": (0, 4),
    }  # fmt: skip
    note = results["notes"][0]
    assert note.startswith(
        "UNFINISHED: 10 of 24 runs (3 of 4 seeds: attnres | 2x16, mudd | 2x16; not begun: all of 2x32)"
    )
    shown = to_markdown(results)
    assert shown.startswith("**Unfinished: 10 of 24 runs")
    assert [columns(results)["seeds"](row) for row in results["rows"]] == ["4 of 4", "3 of 4", "3 of 4"]
    assert [line.split(",")[0] for line in to_csv(results).splitlines()[1:]] == [
        f"{row} | 2x16" for row in GIVEN["designs"]
    ]
    told = verdict(results, "a")
    assert told["found"].startswith("so far, significantly better than standard | 2x16 (3 seeds): attnres | 2x16")
    assert (told["next"], told["command"]) == (
        "10 of 24 runs are there; the rest:", "residua compare --plan x.toml --out a",
    )  # fmt: skip
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_verdicts_so_far_are_corrected_for_all_rows_of_the_plan(tmp_path):
    """Two rows have an interval and two are owed one: the smallest p-value is multiplied by four."""
    one = plan()
    begin(tmp_path, one, 9)
    results = collect(one, tmp_path, so_far=True)
    least = min(results["rows"][1:], key=lambda row: row["difference"]["p"])
    assert least["adjusted"] == pytest.approx(4 * least["difference"]["p"])
    assert results["statistics"]["rows"] == 4


def test_row_whose_rates_are_not_all_tried_has_no_line_yet(tmp_path):
    one = plan()
    begin(tmp_path, one, 0, rows=("standard", "attnres"))
    trial = next(trial for trial in one.tuning() if trial.variant.design == "mudd")
    leave(tmp_path / trial.folder, trial.config, 3.0)
    assert {label.split(" | ")[0] for label in choose_rates(one, tmp_path)} == {"standard", "attnres"}
    with pytest.raises(ValueError, match="has no finished run of the baseline"):
        collect(one, tmp_path, so_far=True)
    begin(tmp_path, plan(designs=["standard", "attnres"]), 6, rows=("standard", "attnres"))
    results = collect(one, tmp_path, so_far=True)
    assert [row["label"] for row in results["rows"]] == ["standard | 2x16", "attnres | 2x16"]
    assert "rates not all tried (1 of 2): mudd | 2x16, mudd | 2x32" in results["notes"][0]
    assert len(results["tuning"]) == 5


def test_row_that_breaks_everywhere_is_left_out_at_every_size_and_is_not_waited_for(tmp_path):
    """Its rates were tried at the first size; the second has no tuning runs of its own to name."""
    one = plan()
    begin(tmp_path, one, 0, rows=("standard", "attnres"))
    for trial in one.tuning():
        if trial.variant.design == "mudd":
            break_run(tmp_path / trial.folder)
    for each in one.runs(choose_rates(one, tmp_path)):
        if each.variant.design != "mudd":
            leave(tmp_path / each.folder, each.config, loss_of(each.config))
    for each in one.checking(choose_rates(one, tmp_path)):
        leave(tmp_path / each.folder, each.config, 3.0)
    results = collect(one, tmp_path)
    assert "unfinished" not in results
    for size in ("2x16", "2x32"):
        assert any(note.startswith(f"mudd | {size} is LEFT OUT: every rate diverged") for note in results["notes"])


def test_finished_plan_is_the_same_table_so_far(tmp_path):
    one = plan(designs=["standard", "attnres"])
    begin(tmp_path, one, 99)
    for each in one.checking(choose_rates(one, tmp_path)):
        leave(tmp_path / each.folder, each.config, 3.0)
    assert collect(one, tmp_path, so_far=True) == collect(one, tmp_path)


def test_sharpness_of_every_run_is_in_the_results(tmp_path):
    """The claim about routing is judged by it, seed by seed."""
    one = plan(designs=["standard", "attnres"])
    begin(tmp_path, one, 2)
    routing = tmp_path / one.runs({})[4].folder / "routing.json"
    found = json.loads(routing.read_text())
    found["deep_third"] = found["deep_third"] | {"max_weight": 0.6}
    routing.write_text(json.dumps(found))
    results = collect(one, tmp_path, so_far=True)
    assert [each["deep_max_weight"] for each in results["runs"]] == [None, 0.6]
    assert [each["gradient_norm"] for each in results["runs"]] == [1.0, 1.0]


def test_time_that_is_up_saves_every_run_and_starts_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(executing, "PATIENCE", 0.1)
    clock = iter([0.0, 0.0, 5.0, 11.0, *[12.0 + i for i in range(99)]])
    monkeypatch.setattr(executing.time, "monotonic", lambda: next(clock))
    pauses = iter(range(50))  # a loop that forgets its time ends here
    monkeypatch.setattr(executing.time, "sleep", lambda seconds: next(pauses))
    pool, one = Fake("never"), plan(tune={})
    deadline = deadline_after(10 / 60)
    with pytest.raises(TimeIsUp):
        execute(one.runs({}), tmp_path, pool=pool, jobs=1, threads=1, listen=lambda event: None, deadline=deadline)
    assert len(pool.started) == len(pool.stopped) == 1


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_time_of_a_command_is_a_positive_number(minutes):
    with pytest.raises(ValueError, match="--stop-after"):
        deadline_after(minutes)
    assert deadline_after(None) is None


PLAN = """
designs = ["standard", "attnres"]
seeds = [0, 1, 2]
sizes = [{ depth = 1, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 4
batch = 2
context = 16
eval_every = 4
eval_windows = 2
save_every = 4

[tune]
lr = [4e-3]
seeds = [7]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A text, a plan, and a pool that makes runs in this process until its time is up."""
    write_text(tmp_path / "text")
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["residua", "compare", "--plan", "plan.toml"])
    pool = Inside()
    monkeypatch.setattr(run, "make_pool", lambda on, out: pool)
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # tests/compare/test_records.py has pictures
    return pool


def command(out, *flags):
    return CliRunner().invoke(app, ["compare", "--plan", "plan.toml", "--out", out, "--records", "kept", *flags])


@pytest.mark.slow
def test_command_that_runs_out_of_time_says_so_and_its_records_give_a_table(place, tmp_path, monkeypatch):
    """Two tuning runs and a pass and a half are made; the table of them trains nothing and comes out the same twice."""
    held = deadline_after(1.0)
    monkeypatch.setattr(run, "deadline_after", lambda minutes: minutes and (held if len(place.made) < 5 else 0.0))
    begun = executing.time.monotonic
    monkeypatch.setattr(executing.time, "monotonic", lambda: begun() + (1e6 if len(place.made) >= 5 else 0))
    done = command("first", "--stop-after", "1")
    assert done.exit_code == 124
    assert "the time is up; every run is saved, and the same command goes on" in done.output
    assert [folder.relative_to("first").as_posix() for folder in place.made[2:]] == [
        "runs/standard/seed0", "runs/attnres/seed0", "runs/standard/seed1",
    ]  # fmt: skip
    monkeypatch.setattr(executing.time, "monotonic", begun)
    place.made.clear()
    made = {}
    for out in ("one/table", "two/table"):  # a page has the name of its directory
        said = command(out, "--so-far")
        assert said.exit_code == 0, said.output
        assert "so far, nothing is judged yet" in said.output
        made[out] = {path.name: path.read_bytes() for path in (tmp_path / out).glob("results.*")}
        made[out] |= {name: (tmp_path / out / name).read_bytes() for name in ("figures.json", "report.html")}
    first, second = made.values()
    assert first == second
    assert json.loads(first["results.json"])["unfinished"]["runs"] == 3
    assert b"UNFINISHED: 3 of 6 runs (2 of 3 seeds: standard; 1 of 3 seeds: attnres)" in first["report.html"]
    assert not place.made
    assert (
        command("one/table", "--no-report").exit_code == 0
    )  # the same directory goes on, with the runs that are missing
    assert len(place.made) == 3
    assert "unfinished" not in json.loads((tmp_path / "one" / "table" / "results.json").read_text())


def test_so_far_refuses_what_it_does_not_need(place):
    assert "needs no --stop-after" in str(command("first", "--so-far", "--stop-after", "1").exception)
    assert "has no finished run" in str(command("first", "--so-far").exception)
    shutil.rmtree("first")
    assert "give minutes, more than 0" in str(command("first", "--stop-after", "0").exception)
