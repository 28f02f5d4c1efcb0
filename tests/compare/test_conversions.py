"""A checkpoint that goes on as it is, beside its conversions: planned, run, stopped, judged and foreseen."""

import json
import math

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.advise.evidence import measured
from residua.lab.advise.paper_claims import PaperClaim, judge
from residua.lab.compare.recipes import find_plan
from residua.lab.compare.verdict import verdict
from residua.lab.conversions import ConversionPlan, compare_conversions, is_conversion, read_conversion
from residua.lab.conversions import run as running
from residua.lab.conversions.base import foreseen, in_lines
from residua.lab.conversions.plan import BASE
from residua.lab.conversions.results import collect, enough, to_markdown
from residua.lab.train import read_metrics
from tests.compare.inside import Inside, write_text

PLAN = """
designs = ["delta:blocks=2"]
seeds = [0, 1, 2]
[base]
depth = 2
width = 16
heads = 2
[pretrain]
corpus = "dir:text"
steps = 6
batch = 2
context = 16
eval_windows = 8
lr = 1e-2
[finetune]
corpus = "dir:text"
steps = 3
batch = 2
context = 16
eval_windows = 8
[tune]
lr = [1e-3]
residual_lr = [1e-3, 1e-2]
base_lr = [1e-3, 2e-3]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The plan, run once in this process: its directory, the folders that were trained, and the results."""
    folder = tmp_path_factory.mktemp("conversions")
    write_text(folder / "text")
    (folder / "plan.toml").write_text(PLAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RESIDUA_CACHE", str(folder / "cache"))
        pool = Inside()
        patch.setattr(running, "make_pool", lambda on, out: pool)
        plan = read_conversion(folder / "plan.toml")
        results = compare_conversions(plan, "out", command="residua compare --plan plan.toml --out out")
        yield folder, plan, pool, results


def test_every_row_is_tuned_by_as_many_runs_and_reported_on_other_seeds(made):
    _, plan, pool, _ = made
    folders = [folder.relative_to("out").as_posix() for folder in pool.made]
    assert folders[0] == BASE
    assert folders[1:5] == [
        "tune/base/lr0.001-seed1000",
        "tune/base/lr0.002-seed1000",
        "tune/delta-blocks-2/lr0.001-residual_lr0.01-seed1000",
        "tune/delta-blocks-2/lr0.001-residual_lr0.001-seed1000",
    ]
    assert folders[5:] == [f"runs/{row}/seed{seed}" for seed in (0, 1, 2) for row in ("base", "delta-blocks-2")]
    assert plan.trial_count(BASE) == plan.trial_count("delta:blocks=2") == 2


def test_rows_start_at_the_loss_of_the_pretrained_checkpoint(made):
    _, _, _, results = made
    base, converted = results["rows"]
    assert base["before"]["mean"] == converted["before"]["mean"] == pytest.approx(results["pretraining"]["loss"])
    assert results["pretraining"]["curve"][0]["loss"] > results["pretraining"]["loss"]
    assert base["gained"]["mean"] == pytest.approx(base["before"]["mean"] - base["after"]["mean"])


def test_what_was_run_is_not_run_again(made):
    folder, plan, pool, results = made
    before = len(pool.made)
    again = compare_conversions(plan, "out", command=results["command"])
    assert (len(pool.made), json.dumps(again)) == (before, json.dumps(results))
    assert json.loads((folder / "out" / "conversions.json").read_text()) == json.loads(json.dumps(results))
    with pytest.raises(ValueError, match="belongs to another plan"):
        compare_conversions(ConversionPlan.from_json(plan.to_json() | {"seeds": [7, 8, 9]}), "out")


def test_the_rise_is_the_worst_excess_over_the_base_on_the_same_batch(made):
    folder, _, _, results = made
    metrics = [
        list(read_metrics(folder / "out" / "runs" / row / "seed1" / "metrics.jsonl"))
        for row in ("delta-blocks-2", "base")
    ]
    own, base = ([line["loss"] for line in lines if line["kind"] == "train"] for lines in metrics)
    assert results["rows"][1]["rises"][1] == max(a - b for a, b in zip(own, base, strict=True))
    assert results["rows"][1]["rise"] == max(results["rows"][1]["rises"])
    assert own[0] == base[0]


def test_a_run_of_other_batches_is_refused(made, monkeypatch):
    _, plan, _, results = made
    chosen = {row["label"]: row["rates"] for row in results["rows"]}
    monkeypatch.setattr(
        "residua.lab.conversions.results._updates", lambda folder: [(str(folder), 1.0)]
    )  # each its own batches
    with pytest.raises(ValueError, match="different batches"):
        collect(plan, running.Path("out"), chosen)


def test_differences_are_paired_and_corrected_for_many_rows(made):
    _, _, _, results = made
    row = results["rows"][1]
    gap = row["difference"]
    assert gap["low"] <= gap["mean"] <= gap["high"]
    assert gap["significant"] == (row["adjusted"] <= 0.05)
    assert results["statistics"]["over_rows"] == "Holm"
    told = verdict(results, "out")
    assert told["found"]
    text = to_markdown(results)
    assert "| `delta:blocks=2` |" in text
    assert "lowers its loss by" in text


def test_results_answer_claims_and_give_no_advice_about_training_from_scratch(made):
    folder, _, _, results = made
    claim = PaperClaim(claim="It pays", who="a paper", results="out", own="delta:blocks=2")
    (judged,) = judge(folder, [claim])
    assert judged.verdict in ("holds", "contradicted", "does not show", "undecided")
    assert judged.difference.mean == pytest.approx(results["rows"][1]["difference"]["mean"])
    assert not measured(folder)
    assert enough(results).startswith("Was ordinary fine-tuning enough? Of 1 conversion, ")
    worse = json.loads(json.dumps(results))
    worse["rows"][1]["gained"]["mean"] = -0.1
    assert "not for delta:blocks=2, no lower than before" in enough(worse)


def test_a_row_that_broke_is_left_out_and_said(made, monkeypatch):
    _, plan, _, results = made
    chosen = {row["label"]: row["rates"] for row in results["rows"]}
    why = {"step": 2, "site": "l0_mlp", "message": "step 2: nan"}
    monkeypatch.setattr(
        "residua.lab.conversions.results.divergence", lambda folder: why if "delta" in str(folder) else None
    )
    found = collect(plan, running.Path("out"), chosen)
    assert [row["label"] for row in found["rows"]] == [BASE]
    assert any("step 2: nan" in note for note in found["notes"])
    assert math.isfinite(found["rows"][0]["after"]["mean"])


def test_a_checkpoint_that_is_there_needs_no_pretraining_and_no_grid(made):
    _, plan, pool, _ = made
    before = len(pool.made)
    values = {"designs": ["delta:blocks=2"], "seeds": [0], "checkpoint": "out/base/model", "finetune": plan.finetune}
    results = compare_conversions(ConversionPlan.from_json(values), "brought")
    assert [path.as_posix() for path in pool.made[before:]] == [
        "brought/runs/base/seed0", "brought/runs/delta-blocks-2/seed0",
    ]  # fmt: skip
    assert results["pretraining"] is None
    assert results["notes"] == ["1 seed: no interval below three, and no difference is judged."]
    assert verdict(results, "brought")["found"].startswith("nothing is judged")
    found = foreseen(ConversionPlan.from_json(values), lambda line: None)
    assert "pretraining" not in found
    assert found["hours"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": "somewhere"}, "one of the two"),
        ({"seeds": [0, 2000]}, "seed 2000 is used before"),
        ({"seeds": [1000], "tune": {"lr": [1e-3]}}, "seed 1000 is used before"),
        ({"finetune": {"seed": 3}}, "which the plan sets itself"),
        ({"finetune": {"stepz": 3}}, "unknown training fields: stepz"),
        ({"tune": {"residual_lr": [1e-3]}}, "need tune.lr"),
        ({"tune": {"lr": [1e-3, 1e-3]}}, "positive numbers, each another"),
        ({"base": {"deepness": 3}}, "has no 'deepness'"),
        ({"designs": ["dleta"]}, "dleta"),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(changes, said):
    plan = {"designs": ["delta"], "base": {"depth": 2}, "finetune": {"steps": 3}}
    with pytest.raises((ValueError, KeyError), match=said):
        ConversionPlan.from_json(plan | changes)


def test_a_design_that_no_checkpoint_can_become_is_refused_before_pretraining(made):
    _, plan, pool, _ = made
    before = len(pool.made)
    with pytest.raises(ValueError, match="elc"):
        compare_conversions(ConversionPlan.from_json(plan.to_json() | {"designs": ["elc"]}), "other")
    assert len(pool.made) == before


def test_the_shipped_recipe_is_what_it_says_and_costs_what_is_foreseen(tmp_path):
    recipe = find_plan(running.Path("finetune"))
    assert is_conversion(recipe)
    assert not is_conversion(find_plan(running.Path("demo")))
    found = foreseen(read_conversion(recipe))
    assert {row["tuning_runs"] for row in found["rows"]} == {7}
    assert "5 rows, each run 500 steps, 1,024,000 tokens" in in_lines(found)
    text = CliRunner().invoke(app, ["compare", "--plan", str(recipe), "--out", str(tmp_path / "x"), "--dry-run"])
    assert text.output.startswith("pretraining: 12000 steps, 24,576,000 tokens\n")
    assert not (tmp_path / "x").exists()


def test_hours_are_timed_on_the_rows_of_the_plan(tmp_path):
    plan = ConversionPlan.from_json(
        {"designs": ["delta:blocks=2"], "base": {"depth": 1, "width": 8, "heads": 1},
         "pretrain": {"tokenizer": "bpe:300", "batch": 1, "context": 8, "steps": 10},
         "finetune": {"tokenizer": "bpe:300", "batch": 1, "context": 8, "steps": 10}}
    )  # fmt: skip
    told = []
    found = foreseen(plan, told.append)
    assert told == ["timing the pretraining", "timing base", "timing delta:blocks=2"]
    assert 0 < found["pretraining"]["hours"] < found["hours"]
    assert "CPU hours, as measured here" in in_lines(found)
