"""The answer from runs with known numbers: spreads, differences, rates, time, cost and the notes that go with them."""

import csv
import io
import json
from pathlib import Path

import pytest

from residua.lab.common.tables import difference
from residua.lab.compare import ComparePlan
from residua.lab.compare.choice import choose_rates, reported
from residua.lab.compare.results import collect
from residua.lab.compare.table import columns, to_csv, to_markdown
from residua.lab.runs import read_run

SMALL = {"sizes": [{"depth": 2, "width": 16, "heads": 2}], "train": {"steps": 4, "context": 16}}


def write_run(folder, loss, *, seconds=10.0, memory=100, fingerprint="f", weight=None, batch="b"):
    folder.mkdir(parents=True)
    values = dict.fromkeys(("max_weight", "normalised_entropy", "effective_sources", "collapsed_share"), weight)
    result = {
        "loss": loss, "perplexity": loss * 2, "bits_per_byte": loss * 1.5, "tokens": 1000, "parameters": 7,
        "stream_parameters": 1, "fingerprint": fingerprint,
        "time": {"cpu_seconds": seconds, "seconds": seconds, "peak_memory": memory, "tokens_per_second": 1.0},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "routing.json").write_text(json.dumps({"network": values, "deep_third": values}))
    lines = [(0.0, loss + 2), (seconds / 2, loss + 1), (seconds, loss)]
    valid = [{"kind": "valid", "loss": x, "time": {"cpu_seconds": t}} for t, x in lines]
    every = [{"kind": "train", "batch": batch}, *valid]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in every))


@pytest.fixture
def compared(tmp_path):
    plan = ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], **SMALL})
    for run, loss in zip(plan.runs({}), (3.0, 3.1, 3.2, 2.8, 2.95, 3.01), strict=True):
        own = run.variant.design != "standard"
        write_run(tmp_path / run.folder, loss, seconds=20.0 if own else 10.0, memory=150 if own else 100,
                  weight=0.5 if own else None)  # fmt: skip
    return plan, tmp_path


def test_results_by_hand(compared):
    results = collect(*compared)
    base, own = results["rows"]
    assert base["baseline"]
    assert base["difference"] is None
    assert base["loss"]["mean"] == pytest.approx(3.1)
    assert base["loss"]["deviation"] == pytest.approx(0.1)
    gap = own["difference"]
    assert gap["mean"] == pytest.approx((-0.2 - 0.15 - 0.19) / 3)
    half = 4.302653 * 0.0264575 / 3**0.5
    assert gap["low"] == pytest.approx(gap["mean"] - half, abs=1e-5)
    assert gap["significant"] is True
    assert own["speed"] == pytest.approx(0.5)
    assert own["memory"] == pytest.approx(1.5)
    assert own["loss_at_equal_time"]["mean"] == pytest.approx(own["loss"]["mean"] + 1)  # at 10 of 20 seconds
    assert base["loss_at_equal_time"]["mean"] == pytest.approx(base["loss"]["mean"])
    assert own["routing"]["deep_max_weight"] == 0.5
    assert base["routing"]["max_weight"] is None
    assert any("not tuned" in note for note in results["notes"])


def test_difference_is_that_of_runs_with_one_seed(tmp_path):
    """A row that is worse where the baseline is better has no steady difference, though both spread alike."""
    plan = ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], **SMALL})
    for run, loss in zip(plan.runs({}), (3.0, 3.1, 3.2, 3.2, 3.1, 3.0), strict=True):
        write_run(tmp_path / run.folder, loss)
    gap = collect(plan, tmp_path)["rows"][1]["difference"]
    assert gap["mean"] == pytest.approx(0.0, abs=1e-12)
    assert gap["high"] == pytest.approx(4.302653 * 0.2 / 3**0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("seconds", "loss"), [(0.0, 5.0), (2.5, 4.5), (5.0, 4.0), (7.5, 3.5), (10.0, 3.0), (99.0, 3.0)]
)
def test_loss_at_a_time_lies_between_validations(tmp_path, seconds, loss):
    write_run(tmp_path / "a", 3.0)
    assert read_run(tmp_path / "a", 0).loss_at(seconds) == pytest.approx(loss)


def test_rates_are_the_best_on_the_tuning_seeds_and_an_edge_is_said(tmp_path):
    plan = ComparePlan.from_json(
        {"designs": ["standard", "delta:blocks=2"], **SMALL,
         "tune": {"lr": [1e-3, 2e-3, 4e-3], "residual_lr": [1e-3, 1e-2], "seeds": [100, 101]}}
    )  # fmt: skip
    for run in plan.tuning():
        goal = 2e-3 if run.variant.design == "standard" else 4e-3
        loss = 3 + abs(run.config.lr - goal) * 100 + abs(run.config.residual_rate - 1e-3) + run.config.seed / 1e4
        write_run(tmp_path / run.folder, loss)
    chosen = choose_rates(plan, tmp_path)
    assert chosen == {"standard": {"lr": 2e-3}, "delta:blocks=2": {"lr": 4e-3, "residual_lr": 1e-3}}
    for run in plan.runs(chosen):
        write_run(tmp_path / run.folder, 3.0 + run.config.seed / 10)
    results = collect(plan, tmp_path)
    assert [row["edge"] for row in results["rows"]] == [False, True]
    assert [row["trials"] for row in results["rows"]] == [6, 12]
    assert any("edge of the grid" in note for note in results["notes"])
    assert any("tuned by 12 runs and the baseline standard by 6" in note for note in results["notes"])


def break_run(folder, *, step=3, site="0.mlp"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "diverged.json").write_text(
        json.dumps({"step": step, "site": site, "message": f"step {step}: the loss is nan at {site}"})
    )


def tuned_plan():
    return ComparePlan.from_json(
        {"designs": ["standard", "delta:blocks=2"], **SMALL, "tune": {"lr": [1e-3, 2e-3, 4e-3], "seeds": [100, 101]}}
    )


def test_rate_that_diverges_on_one_tuning_seed_is_none_to_choose(tmp_path):
    """Even if it is the best on the other; and the one below is not at the edge of the grid."""
    plan = tuned_plan()
    for run in plan.tuning():
        if run.config.lr == 4e-3 and run.config.seed == 101:
            break_run(tmp_path / run.folder)
        else:
            write_run(tmp_path / run.folder, 3 - run.config.lr)
    chosen = choose_rates(plan, tmp_path)
    assert chosen == {"standard": {"lr": 2e-3}, "delta:blocks=2": {"lr": 2e-3}}
    for run in plan.runs(chosen):
        write_run(tmp_path / run.folder, 3.0 + run.config.seed / 10)
    results = collect(plan, tmp_path)
    assert [row["edge"] for row in results["rows"]] == [False, False]
    assert "standard: diverged while tuning at lr 0.004." in results["notes"]
    assert [one["folder"] for one in results["diverged"]] == [
        "tune/standard/lr0.004-seed101", "tune/delta-blocks-2/lr0.004-seed101",
    ]  # fmt: skip


def test_row_whose_every_rate_diverged_is_left_out_and_said(tmp_path):
    plan = tuned_plan()
    for run in plan.tuning():
        if run.variant.design == "standard":
            write_run(tmp_path / run.folder, 3.0)
        else:
            break_run(tmp_path / run.folder)
    for run in (begun := reported(plan, tmp_path)):
        write_run(tmp_path / run.folder, 3.0)
    assert {run.variant.design for run in begun} == {"standard"}
    results = collect(plan, tmp_path)
    assert [row["label"] for row in results["rows"]] == ["standard"]
    assert any(
        note.startswith("delta:blocks=2 is LEFT OUT: every rate diverged (tune/delta-blocks-2/lr0.004-seed101, step 3")
        for note in results["notes"]
    )
    to_csv(results), to_markdown(results)


def test_baseline_whose_every_rate_diverged_ends_it(tmp_path):
    plan = tuned_plan()
    for run in plan.tuning():
        break_run(tmp_path / run.folder)
    with pytest.raises(ValueError, match=r"every rate of the baseline standard diverged.*smaller"):
        reported(plan, tmp_path)


def test_row_with_a_reported_run_that_diverged_is_left_out_whole(compared):
    plan, out = compared
    break_run(out / "runs/delta-blocks-2/seed1", step=304, site="3.attn")
    results = collect(plan, out)
    assert [row["label"] for row in results["rows"]] == ["standard"]
    assert {run["label"] for run in results["runs"]} == {"standard"}
    (note,) = [note for note in results["notes"] if "LEFT OUT" in note]
    assert note.startswith("delta:blocks=2 is LEFT OUT: seed1 diverged (runs/delta-blocks-2/seed1, step 304: ")


def test_different_corpora_are_refused_unless_forced(compared):
    plan, out = compared
    last = out / plan.runs({})[-1].folder / "result.json"
    last.write_text(last.read_text().replace('"f"', '"other"'))
    lines = last.with_name("metrics.jsonl")  # of another text the batches are others too
    lines.write_text(lines.read_text().replace('"batch": "b"', '"batch": "c"'))
    with pytest.raises(ValueError, match="do not compare"):
        collect(plan, out)
    assert any("FORCED" in note for note in collect(plan, out, force=True)["notes"])


def test_runs_of_one_seed_that_saw_different_batches_are_refused(tmp_path):
    plan = ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], **SMALL})
    for run in plan.runs({}):
        odd = run.variant.design != "standard" and run.config.seed == 1
        write_run(tmp_path / run.folder, 3.0, batch="c" if odd else "b")
    with pytest.raises(ValueError, match="one seed but saw different batches"):
        collect(plan, tmp_path)


@pytest.mark.parametrize(
    ("gap", "shown"),
    [
        (None, "baseline"),
        (
            {"mean": -0.04, "low": -0.06, "high": -0.02, "detectable": 0.01, "significant": True},
            "-0.0400 [-0.0600, -0.0200]",
        ),
        (
            {"mean": 0.01, "low": -0.1, "high": 0.12, "detectable": 0.05, "significant": False},
            "+0.0100 n.s. (MDE 0.0500)",
        ),
        ({"mean": 0.5, "low": None, "high": None, "detectable": None, "significant": None}, "+0.5000 (no interval)"),
    ],
    ids=["baseline", "clear", "noise", "two seeds"],
)
def test_difference_inside_the_noise_is_called_that(gap, shown):
    assert difference({"difference": gap}) == shown


def test_difference_is_shown_in_other_digits_and_words():
    gap = {"mean": 0.01, "low": -0.1, "high": 0.12, "detectable": 0.05, "significant": False}
    assert difference({"difference": gap}, 3, "no difference") == "+0.010 no difference (MDE 0.050)"


def test_fewer_than_three_seeds_have_no_interval(tmp_path):
    plan = ComparePlan.from_json({"designs": ["standard", "delta:blocks=2"], "seeds": [0, 1], **SMALL})
    for run in plan.runs({}):
        write_run(tmp_path / run.folder, 3.0)
    results = collect(plan, tmp_path)
    assert results["rows"][1]["difference"]["low"] is None
    assert any("no interval" in note for note in results["notes"])


def test_files_hold_the_same_numbers(compared):
    results = collect(*compared)
    rows = list(csv.DictReader(io.StringIO(to_csv(results))))
    for row, line in zip(results["rows"], rows, strict=True):
        assert float(line["loss_mean"]) == row["loss"]["mean"]
        assert line["design"] == row["design"]
        expected = "" if row["difference"] is None else str(row["difference"]["mean"])
        assert line["difference_mean"] == expected
    text = to_markdown(results)
    for row in results["rows"]:
        for cell in columns(results).values():
            assert cell(row) in text


def test_notebook_shows_the_table_escaped_and_in_both_colour_schemes(compared):
    results = collect(*compared)
    results["rows"][1]["label"] = "<script>alert(1)</script>"
    results.series = ()  # as read from results.json: the table alone
    shown = results._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "light-dark(" in shown
    assert "minimum detectable effect" in shown
    assert not any(word in shown for word in ("http:", "https:", "url(", "@import")), "nothing is fetched"
    for title, cell in columns(results).items():
        assert f"<th>{title}</th>" in shown
        assert f"<td>{cell(results['rows'][0])}</td>" in shown
    assert json.loads(json.dumps(results)) == results


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "results").glob("*/results.json")), ids=lambda file: file.parent.name
)
def test_committed_table_is_that_of_the_committed_results(file):
    assert file.with_name("results.md").read_text() == to_markdown(json.loads(file.read_text()))
