"""Committed results belong to the plans beside them, and README shows what the files say."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.compare import read_plan
from residua.lab.compare.verdict import verdict
from tests.refusals.harness import residua

pytestmark = pytest.mark.slow  # commands in processes of their own

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "results").glob("*/results.json"))
EARLIER = sorted((ROOT / "results").glob("*/earlier.json"))


@pytest.mark.parametrize("file", EARLIER, ids=lambda file: file.parent.name)
def test_earlier_run_saw_the_same_text(file):
    """And chose the same rates: what moved is the arithmetic alone."""
    earlier, later = (json.loads(path.read_text()) for path in (file, file.with_name("results.json")))
    assert earlier["fingerprints"] == later["fingerprints"]
    assert [row["rates"] for row in earlier["rows"]] == [row["rates"] for row in later["rows"]]
    assert earlier["runs"] != later["runs"]


@pytest.mark.parametrize("file", [*RESULTS, *EARLIER], ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_results_belong_to_their_plan(file):
    results = json.loads(file.read_text())
    plan = read_plan(ROOT / "recipes" / f"{file.parent.name}.toml")
    assert results["plan"] == plan.to_json()
    assert results["digest"] == plan.digest
    assert results["command"].startswith("residua compare")
    lost = {one["label"] for one in results.get("diverged", ()) if one["folder"].startswith("runs/")}
    left = {row["label"]: row for row in results.get("unfinished", {"rows": ()})["rows"]}
    begun = [label for label, row in left.items() if row["seeds"]]
    there = [
        each.label
        for each in plan.variants()
        if each.label not in lost and (each.label not in left or each.label in begun)
    ]
    assert [row["label"] for row in results["rows"]] == there
    seeds = {each.label: len(plan.seeds_of(each)) for each in plan.variants()} | {
        label: row["seeds"] for label, row in left.items()
    }
    assert len(results["runs"]) == sum(seeds[label] for label in there)
    assert len(results["fingerprints"]) == 1


def test_demo_trains_at_the_rates_that_a_committed_run_chose():
    """Each row's is the best on the tuning seeds, which the demo does not report, and inside the grid."""
    plan, chose = (read_plan(ROOT / "recipes" / f"{name}.toml") for name in ("demo", "demo-rates"))
    found = json.loads((ROOT / "results" / "demo" / "rates.json").read_text())
    assert found["plan"] == chose.to_json()
    assert found["command"].startswith("residua compare --plan recipes/demo-rates.toml")
    assert not set(chose.tune.seeds) & set(plan.seeds)
    for label, rate in plan.chosen.items():
        losses = {}
        for run in found["tuning"]:
            if run["label"] == label:
                losses.setdefault(run["lr"], []).append(run["loss"])
        assert sorted(losses) == sorted(chose.tune.lr)
        assert min(losses, key=lambda lr: sum(losses[lr])) == rate
        assert min(losses) < rate < max(losses)
    assert chose.to_json() | {"chosen": plan.to_json()["chosen"], "tune": plan.to_json()["tune"]} == plan.to_json()


def test_demo_has_an_answer():
    """At equal parameters, by the tool's own statistics: a difference beyond the noise, on one axis, and one inside."""
    results = json.loads((ROOT / "results" / "demo" / "results.json").read_text())
    sizes = [row["parameters"] for row in results["rows"]]
    assert max(sizes) < 1.01 * min(sizes)
    judged = {row["label"]: row["difference"] for row in results["rows"] if row["difference"]}
    assert judged["standard | canon,attn,mlp"]["significant"]
    assert judged["standard | canon,attn,mlp"]["mean"] < 0
    assert any(gap["significant"] is False for gap in judged.values())
    told = verdict(results, "runs/demo")
    assert "standard | canon,attn,mlp" in told["found"]
    assert told["unclear"]
    done = CliRunner().invoke(app, [*shlex.split(told["command"])[1:], "--dry-run"])
    assert done.exit_code == 0, done.exception


def test_readme_tables_are_up_to_date():
    subprocess.run([sys.executable, "tools/update_readme", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("line", re.findall(r"^residua (?:compare|train) .*", (ROOT / "README.md").read_text(), re.M))
def test_readme_command_is_one_that_would_run(line, tmp_path):
    """The long commands of README, as far as `--dry-run` goes: every flag, design and size in them is right."""
    arguments = [part.replace("runs/", f"{tmp_path}/") for part in shlex.split(line)[1:]]
    done = residua(*arguments, "--dry-run")
    assert done.code == 0, done.err
    assert not list(tmp_path.iterdir())
