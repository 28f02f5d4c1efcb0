"""Training on a task: equal rows for every design, exact accuracy, and "no difference" where there is none."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab import tasks
from residua.lab.common.locks import RunLocked
from residua.lab.tasks import experiment
from residua.lab.tasks.experiment import TUNING_SEED, Rows, Solver, TaskRecipe, run_task, train_on
from residua.lab.tasks.kept import kept_in
from residua.lab.tasks.task import Batch, Task
from residua.lab.train import Trainer
from residua.model import Transformer

QUICK = TaskRecipe(steps=6, batch=4, width=16, depth=2, heads=2, every=3, tested=16)


class Copy(Task):
    """Every token is its own answer."""

    name, separates, vocab, length, answers = "copy", "nothing", 4, 6, 4

    def draw(self, size, generator):
        ids = torch.randint(4, (size, 6), generator=generator)
        return Batch(ids, ids, {})


def test_easy_task_is_solved_and_the_step_is_told():
    recipe = TaskRecipe(steps=150, batch=16, width=16, depth=1, heads=2, every=10, tested=64, lr=1e-2)
    found = train_on(Copy(), recipe.config(Copy(), "standard", "attn,mlp"), recipe.tested)
    assert found["accuracy"] > 0.95
    assert found["steps_to_solve"] in range(10, 151, 10)
    assert [step for step, _ in found["curve"]] == list(range(10, 151, 10))


def test_loop_is_the_plain_one_to_the_last_bit():
    """AdamW without decay, a rise of a twentieth of the steps, clipping at 1: written out here, with the same rows."""
    task, recipe = tasks.build("khop"), replace(QUICK, steps=63)
    config = recipe.config(task, "delta", "attn,mlp", seed=2)
    subject = Solver(config, task.vocab, torch.device("cpu"))
    lines = list(Trainer(config, Rows(task, config, 16), subject).lines())
    model = Transformer(config.model(task.vocab), seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    drawn = torch.Generator().manual_seed(5)
    for step, line in enumerate((line for line in lines if line["kind"] == "train"), start=1):
        ids, targets, _ = task.batch(4, drawn)
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, step / 3)
        loss = model(ids, targets=targets)
        assert loss.item() == line["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert step == 63
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, subject.model.get_parameter(name)), name


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


def test_every_row_chooses_its_own_rate_on_a_seed_that_is_not_reported():
    """The rate with the best accuracy there, and an edge is said."""
    rates, designs = [1e-4, 1e-2, 3e-2], ["standard", "delta"]
    seen = []
    found = run_task("parity", designs, (0,), QUICK, seen.append, rates=rates)
    tried = [event for event in seen if event["seed"] == TUNING_SEED]
    assert [(event["design"], event["lr"]) for event in tried] == [(d, lr) for d in designs for lr in rates]
    for row in found["rows"]:
        own = {event["lr"]: event["accuracy"] for event in tried if event["design"] == row["design"]}
        assert own[row["lr"]] == max(own.values())
        (reported,) = [event for event in seen if event["seed"] == 0 and event["design"] == row["design"]]
        assert reported["lr"] == row["lr"]
        edge = row["lr"] in (rates[0], rates[-1])
        assert any(f"{row['design']} in attn,mlp: its rate" in note for note in found["notes"]) == edge
    assert not any("not tuned" in note for note in found["notes"])
    assert any("not tuned" in note for note in run_task("parity", designs, (0,), QUICK)["notes"])


def test_rate_that_diverges_is_not_taken():
    found = run_task("parity", ["standard"], (0,), QUICK, rates=[1e-3, 1e30])
    assert found["rows"][0]["lr"] == 1e-3
    assert any("diverged while tuning at lr 1e+30 (step" in note for note in found["notes"])
    with pytest.raises(ValueError, match="every rate of standard in attn,mlp diverged; give smaller"):
        run_task("parity", ["standard"], (0,), QUICK, rates=[1e30])


def test_reported_run_that_diverges_is_named():
    with pytest.raises(ValueError, match=r"attn,mlp, seed 0, diverged at lr 1e\+30: step 2: the gradient of"):
        run_task("parity", ["standard"], (0,), replace(QUICK, lr=1e30))


def test_stopped_experiment_goes_on_to_the_same_answer(tmp_path):
    """Broken off after two runs, those are not made again; other steps are other runs."""
    whole = run_task("parity", ["standard", "delta"], (0, 1), QUICK, rates=[1e-3, 1e-2])
    path = tmp_path / "deep" / ".parity.json.runs"

    def again(listen=None, seeds=(0, 1), recipe=QUICK, designs=("standard", "delta"), rates=(1e-3, 1e-2)):
        with kept_in(path) as kept:
            return run_task("parity", designs, seeds, recipe, listen, rates=rates, kept=kept)

    class Enough(Exception):
        pass

    seen = []

    def stop(event):
        seen.append(event)
        if len(seen) == 2:
            raise Enough

    def stop_at_once(event):
        raise Enough

    with pytest.raises(Enough):
        again(stop)
    assert len(json.loads((path / "runs.json").read_text())) == 2
    with pytest.raises(Enough):
        again(stop_at_once, recipe=replace(QUICK, steps=5))
    assert len(json.loads((path / "runs.json").read_text())) == 3
    trained = []
    real = experiment.train_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "train_on", lambda *given: trained.append(given[2:]) or real(*given))
        assert again() == whole
    assert len(trained) == 2 * (2 + 2) - 2
    assert not path.exists()


def test_two_commands_on_one_file_are_refused(tmp_path):
    """By the name of the process at work."""
    second = kept_in(tmp_path / "runs")
    with kept_in(tmp_path / "runs"), pytest.raises(RunLocked, match=f"in use by process {os.getpid()}"):
        second.__enter__()


def test_wrong_request_writes_nothing(tmp_path):
    wrong = CliRunner().invoke(app, ["tasks", "parity", "-d", "detla", "--out", str(tmp_path / "made" / "parity.json")])
    assert wrong.exit_code != 0
    assert not list(tmp_path.iterdir())


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
        ({"rates": [1e-3], "seeds": (0, TUNING_SEED)}, "flatters it"),
        ({"rates": [1e-3, -1.0]}, "lr must be a positive number"),
    ],
    ids=str,
)
def test_wrong_request_names_the_cure(arguments, cure):
    with pytest.raises(ValueError, match=cure):
        run_task(**({"spec": "parity", "designs": ["standard"], "recipe": QUICK} | arguments))


@pytest.mark.parametrize("changes", [{"steps": 0}, {"batch": 0}, {"lr": 0.0}])
def test_wrong_recipe_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TaskRecipe(**changes)


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


def test_rate_and_grid_together_are_refused():
    wrong = CliRunner().invoke(app, ["tasks", "parity", "--lr", "1e-3", "--lr-grid", "1e-3,2e-3"])
    assert wrong.exit_code != 0
    assert "exclude each other; give one" in str(wrong.exception or wrong.output)


@pytest.mark.slow
def test_interrupted_command_keeps_its_runs_and_goes_on(tmp_path):
    """Ctrl-C in a real process after the first run; the same command then makes only the others."""
    command = [
        sys.executable, "-c", "from residua.cli import main; main()", "tasks", "parity", "--steps", "40", "--width",
        "16", "--depth", "1", "--heads", "2", "--seeds", "6", "--out", "parity.json",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
    )  # fmt: skip
    kept, deadline = tmp_path / ".parity.json.runs" / "runs.json", time.monotonic() + 200
    while not kept.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=120)
    assert first.returncode == 130, error
    assert "the same command resumes" in error
    made = json.loads(kept.read_text())
    assert 1 <= len(made) < 6
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    written = json.loads((tmp_path / "parity.json").read_text())
    for run in made.values():
        assert run in written["rows"][0]["runs"]
    assert not kept.parent.exists()
