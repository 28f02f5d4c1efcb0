"""What a plan would run and take, before it is begun."""

import json

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.compare import ComparePlan, read_plan
from residua.lab.compare.estimate import estimate, seconds
from residua.lab.compare.foreseen import foreseen, in_lines
from residua.lab.compare.sizes import counted_parameters
from residua.lab.train import TrainConfig

PLAN = {
    "designs": ["standard", "delta"], "seeds": [0, 1, 2],
    "sizes": [{"depth": 1, "width": 16, "heads": 2, "tokens_per_parameter": 20},
              {"depth": 1, "width": 32, "heads": 2, "tokens_per_parameter": 20, "designs": ["standard"], "seeds": 2}],
    "train": {"tokenizer": "bpe:300", "batch": 2, "context": 16},
    "tune": {"lr": [1e-3, 2e-3], "carry": "width", "check": "1x32"},
}  # fmt: skip


def test_runs_are_counted_by_kind():
    found = foreseen(ComparePlan.from_json(PLAN))
    assert (found["tuning_runs"], found["checking_runs"], found["reported_runs"]) == (4, 3, 8)
    assert [row["seeds"] for row in found["rows"]] == [3, 3, 2]
    assert "hours" not in found
    said = in_lines(found)
    assert "3 rows x 2 to 3 seeds, baseline standard" in said
    assert "4 tuning runs, 3 runs to check lr ~ width^-1, then 8 reported runs" in said


def test_hours_are_runs_times_seconds(monkeypatch):
    monkeypatch.setattr("residua.lab.compare.estimate.seconds", lambda config: (2.0, 10.0))
    plan = ComparePlan.from_json(PLAN)
    rows = estimate(plan)
    assert [sum(row["runs"].values()) for row in rows] == [2 + 3, 2 + 3, 3 + 2]
    steps = plan.config(plan.variants()[0], 0).steps
    each = 2.0 * steps + 10.0 * (1 + -(-steps // 100))
    assert rows[0]["hours"] == pytest.approx(5 * each / 3600)
    assert foreseen(plan, lambda text: None)["hours"] == pytest.approx(sum(row["hours"] for row in rows))


def test_seconds_of_a_run_are_measured():
    config = TrainConfig(width=16, depth=1, heads=2, batch=2, context=16, tokenizer="bpe:300", eval_windows=4)
    update, validation = seconds(config)
    assert 0 < update < 60
    assert 0 < validation < 60
    with pytest.raises(ValueError, match="--timed knows the vocabulary"):
        seconds(TrainConfig(tokenizer="hf:nowhere"))


def test_dry_run_of_looks_and_timed_alone(tmp_path):
    flags = [
        "compare",
        "-d",
        "standard",
        "-d",
        "delta",
        "--size",
        "1x16",
        "-s",
        "steps=2",
        "--out",
        str(tmp_path / "a"),
    ]
    done = CliRunner().invoke(app, [*flags, "--until-resolved", "0.01", "--most-seeds", "5", "--dry-run"])
    assert "then seeds until resolved to 0.01: looks at 3, 4, 5 seeds" in done.output
    found = json.loads(CliRunner().invoke(app, [*flags, "--dry-run", "--json"]).output)
    assert found["looks"] == [3]
    alone = CliRunner().invoke(app, [*flags, "--most-seeds", "5", "--dry-run"])
    assert "--most-seeds goes with --until-resolved" in str(alone.exception)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["ladder", "depth"])
def test_recipes_of_long_experiments_are_plans(name, request):
    plan = read_plan(request.config.rootpath / "recipes" / f"{name}.toml")
    assert plan.most_passes == 2
    assert plan.train["corpus"] == "pysite"
    assert plan.tune.carry == {"ladder": "width", "depth": "none"}[name]
    assert len(plan.variants()) >= 30
    widths = {variant.size.width // variant.size.heads for variant in plan.variants()}
    assert name == "depth" or widths == {16}
    counts = [counted_parameters(plan.config(one, 0)) for one in plan.variants() if one == plan.baseline_of(one)]
    if name == "ladder":
        assert [round(count / 1e6, 2) for count in counts] == [0.11, 0.22, 0.4, 0.89]
    else:
        assert max(counts) < 1.12 * min(counts)
