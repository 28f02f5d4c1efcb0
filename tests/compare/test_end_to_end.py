"""The command itself: real processes, a real corpus, stopped and started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

PLAN = """
designs = ["standard", "delta:blocks=2"]
seeds = [0, 1, 2]
sizes = [{ depth = 2, width = 16, heads = 2 }]

[train]
corpus = "dir:text"
steps = 12
batch = 2
context = 16
eval_every = 6
eval_windows = 4
save_every = 3

[tune]
lr = [1e-3, 4e-3]
seeds = [7]
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a small text and the plan."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "text").mkdir()
    for number in range(60):
        words = " ".join(f"word{(number * 37 + place * place) % 101}" for place in range(60))
        (folder / "text" / f"{number}.txt").write_text(f"Text {number}. {words}\n")
    (folder / "plan.toml").write_text(PLAN)
    return folder


def start(workplace, out, *flags):
    return subprocess.Popen(
        [sys.executable, "-c", "from residua.cli import main; main()", "compare", "--plan", "plan.toml",
         "--out", out, "-j", "2", *flags],
        cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"RESIDUA_CACHE": str(workplace / "cache"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a test run may ignore it
    )  # fmt: skip


def timeless(results):
    """The results without what depends on the clock."""
    results = json.loads(json.dumps(results))
    results.pop("command")
    for row in results["rows"]:
        for key in ("speed", "memory", "loss_at_equal_time"):
            row.pop(key)
    for run in results["runs"]:
        run.pop("time")
    return results


@pytest.mark.slow
def test_interrupted_comparison_goes_on_to_the_same_answer(workplace):
    """Ctrl-C in the middle, then again: the answer of a comparison that was never disturbed; a third time, at once."""
    whole = start(workplace, "whole", "--json")
    out, error = whole.communicate(timeout=500)
    assert whole.returncode == 0, error
    expected = json.loads(out)

    broken = start(workplace, "broken", "--json")
    deadline = time.monotonic() + 300
    while not list((workplace / "broken").glob("tune/*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    broken.send_signal(signal.SIGINT)
    _, error = broken.communicate(timeout=120)
    assert broken.returncode == 130, error
    assert "interrupted" in error

    again = start(workplace, "broken", "--json")
    out, error = again.communicate(timeout=500)
    assert again.returncode == 0, error
    assert timeless(json.loads(out)) == timeless(expected)

    begun = time.monotonic()
    third = start(workplace, "broken")
    out, error = third.communicate(timeout=120)
    assert third.returncode == 0, error
    assert time.monotonic() - begun < 60
    assert "vs baseline" in out
    files = {path.name for path in (workplace / "whole").iterdir()}
    assert {"plan.json", "results.json", "results.csv", "results.md", "figures", "figures.json"} <= files
    for row in expected["rows"]:
        assert row["trials"] == 2
        assert row["rates"]["lr"] in (1e-3, 4e-3)
    assert len({run["fingerprint"] for run in expected["runs"]}) == 1


@pytest.mark.slow
def test_failing_run_is_named_and_the_rest_is_kept(workplace):
    """A rate that blows up: the command says which run failed and why, and exits 2."""
    plan = PLAN.split("[tune]")[0].replace("steps = 12", "steps = 12\nlr = 1e30\nexplode = 1e-6")
    (workplace / "bad.toml").write_text(plan)
    done = subprocess.run(
        [sys.executable, "-c", "from residua.cli import main; main()", "compare", "--plan", "bad.toml", "--out", "bad"],
        cwd=workplace, capture_output=True, text=True,
        env=os.environ | {"RESIDUA_CACHE": str(workplace / "cache"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "runs/standard/seed0 failed" in done.stderr
    assert "Traceback" not in done.stderr
