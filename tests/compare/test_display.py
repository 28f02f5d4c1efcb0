"""What a comparison says while it runs: lines in a file, bars on a terminal."""

import io

import pytest
from rich.console import Console

from residua.cli.compare import _Live, _Plain

EVENTS = [
    {"kind": "data", "text": "corpus pycode: the standard library"},
    {"kind": "title", "text": "tuning"},
    {"kind": "phase", "runs": 4, "done": 1},
    {"kind": "started", "run": "tune/standard/lr0.001-seed7", "steps": 12},
    {"kind": "started", "run": "tune/delta/lr0.001-seed7", "steps": 12},
    {"kind": "progress", "run": "tune/standard/lr0.001-seed7"},
    {"kind": "progress", "run": "tune/standard/lr0.001-seed7", "step": 6, "loss": 2.5},
    {"kind": "finished", "run": "tune/standard/lr0.001-seed7", "loss": 1.5, "bits_per_byte": 2.25},
    {"kind": "diverged", "run": "tune/delta/lr0.001-seed7", "step": 3, "site": "0.mlp", "message": "step 3: nan"},
]


@pytest.mark.parametrize("display", [_Plain, _Live])
def test_every_event_is_told(display):
    """Data, title and every end are said; a run that is over has no bar left."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=display is _Live, width=160, markup=False, highlight=False)
    with display(console) as take:
        for event in EVENTS:
            take(event)
    said = written.getvalue()
    assert "corpus pycode: the standard library" in said
    assert "tuning" in said
    assert "tune/standard/lr0.001-seed7: loss 1.5000, 2.2500 bits/byte" in said
    assert "tune/delta/lr0.001-seed7: diverged, step 3: nan" in said


def test_lines_count_what_is_left():
    written = io.StringIO()
    with _Plain(Console(file=written, width=160)) as take:
        for event in EVENTS:
            take(event)
    said = written.getvalue().splitlines()
    assert "1 of 4 runs are already done" in said
    assert said[-2].endswith("; 2 left")
    assert said[-1].endswith("; 1 left")


def test_bars_follow_the_runs():
    display = _Live(Console(file=io.StringIO(), force_terminal=True, width=160))
    with display as take:
        for event in EVENTS[:7]:
            take(event)
        running = {task.description: (task.completed, task.total) for task in display.progress.tasks}
        assert running == {
            "tuning": (1, 4), "tune/standard/lr0.001-seed7": (6, 12), "tune/delta/lr0.001-seed7": (0, 12),
        }  # fmt: skip
        for event in EVENTS[7:]:
            take(event)
        assert [(task.description, task.completed) for task in display.progress.tasks] == [("tuning", 3)]
