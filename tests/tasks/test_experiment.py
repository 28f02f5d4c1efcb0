"""Training on a task: equal rows for every design, exact accuracy, and "no difference" where there is none."""

import json

import pytest
import torch
from typer.testing import CliRunner

from residua import tasks
from residua.cli import app
from residua.tasks.experiment import Recipe, run_task, train_on
from residua.tasks.task import Batch, Task

QUICK = Recipe(steps=6, batch=4, width=16, depth=2, heads=2, every=3, tested=16)


class Copy(Task):
    """Every token is its own answer."""

    name, separates, vocab, length, answers = "copy", "nothing", 4, 6, 4

    def draw(self, size, generator):
        ids = torch.randint(4, (size, 6), generator=generator)
        return Batch(ids, ids, {})


def config_of(task, design, recipe):
    from residua.tasks.experiment import _config

    return _config(task, design, recipe.layout, recipe)


def test_easy_task_is_solved_and_the_step_is_told():
    recipe = Recipe(steps=150, batch=16, width=16, depth=1, heads=2, every=10, tested=64, lr=1e-2)
    found = train_on(Copy(), config_of(Copy(), "standard", recipe), 0, recipe)
    assert found["accuracy"] > 0.95
    assert found["steps_to_solve"] in range(10, 151, 10)
    assert [step for step, _ in found["curve"]] == list(range(10, 151, 10))


def test_results_repeat_and_hold_a_row_a_design():
    one, two = (run_task("parity", ["standard", "delta"], (0, 1, 2), QUICK) for _ in range(2))
    assert one == two
    assert [row["design"] for row in one["rows"]] == ["standard", "delta"]
    assert one["rows"][0]["difference"] is None
    assert one["rows"][1]["difference"]["seeds"] == 3
    assert one["chance"] == tasks.build("parity").chance


def test_rows_can_have_layouts_of_their_own():
    layout = "swa:window=2,attn,mlp"
    plain, own = run_task("parity", ["standard"], (0, 1), QUICK, also=[("standard", layout)])["rows"]
    assert (plain["layout"], own["layout"]) == ("attn,mlp", layout)
    assert own["parameters"] > plain["parameters"]
    assert own["difference"]["seeds"] == 2


def test_equal_designs_show_no_difference():
    """The same network under two names: paired runs agree to the last bit."""
    rows = run_task("parity", ["standard", "denseformer:period=9"], (0, 1, 2), QUICK)["rows"]
    assert rows[1]["difference"]["mean"] == 0
    assert rows[1]["difference"]["significant"] is False


def test_known_routing_is_scored():
    rows = run_task("route-switch:ops=2,queries=1", ["standard", "attnres"], (0,), QUICK)["rows"]
    assert rows[0]["runs"][0]["routing"] is None
    score = rows[1]["runs"][0]["routing"]
    assert 0 <= score["score"] <= 1
    assert score["chance"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"spec": "sudoku"}, "unknown task"),
        ({"designs": []}, "at least one design"),
        ({"designs": ["detla"]}, "did you mean 'delta'"),
        ({"designs": ["delta", "delta"]}, "named twice"),
        ({"also": [("standard", "attn,mlp")]}, "named twice"),
    ],
    ids=str,
)
def test_wrong_request_names_the_cure(arguments, cure):
    with pytest.raises(ValueError, match=cure):
        run_task(**({"spec": "parity", "designs": ["standard"], "recipe": QUICK} | arguments))


@pytest.mark.parametrize("changes", [{"steps": 0}, {"batch": 0}, {"lr": 0.0}])
def test_wrong_recipe_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Recipe(**changes)


def test_command_lists_and_runs():
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["tasks", "--json"]).output)
    assert [row["task"] for row in listed] == list(tasks.names())
    flags = [
        "--steps",
        "4",
        "--width",
        "16",
        "--depth",
        "1",
        "--heads",
        "2",
        "--seeds",
        "3",
        "-d",
        "standard",
        "-d",
        "delta",
    ]
    shown = runner.invoke(app, ["tasks", "parity", *flags])
    assert shown.exit_code == 0, shown.output
    assert "baseline" in shown.output


def test_command_writes_what_it_prints_and_says_what_a_row_is(tmp_path):
    runner, out = CliRunner(), tmp_path / "made" / "parity.json"
    flags = ["--steps", "2", "--width", "16", "--depth", "1", "--heads", "2", "--seeds", "1", "--out", str(out)]
    shown = runner.invoke(app, ["tasks", "parity", *flags, "--also", "standard swa:window=2,attn,mlp", "--json"])
    assert shown.exit_code == 0, shown.output
    written = json.loads(out.read_text())
    assert written["command"].startswith("residua ")
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert written["rows"] == json.loads(shown.stdout)["rows"]
    wrong = runner.invoke(app, ["tasks", "parity", "--also", "swa"])
    assert wrong.exit_code != 0
    assert "a design and a layout" in str(wrong.exception or wrong.output)
