"""A bar on a terminal, plain lines elsewhere; nothing on stdout."""

from __future__ import annotations

import pytest
from rich.console import Console

from residua.lab.train.display import Display
from tests.train.harness import Stop, run, stop_after


def shown(tmp_path, capsys, *, terminal, **options):
    with Display(every=0.0) as display:
        display.console = Console(
            stderr=True, markup=False, highlight=False, force_terminal=terminal, width=150, color_system=None
        )
        run(tmp_path, on_event=display, **options)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_plain_lines_tell_the_whole_run(tmp_path, capsys):
    lines = shown(tmp_path, capsys, terminal=False).splitlines()
    assert lines[0].startswith("delta: ")
    assert "12 steps of 48 tokens, 0.19 passes, from the start" in lines[0]
    assert sum("tokens/s" in line for line in lines) == 12
    assert [line.split()[1] for line in lines if "bits/byte" in line] == ["0/12", "4/12", "8/12", "12/12"]
    assert [line.split()[-1] for line in lines if "saved" in line] == [f"step-{step:08d}" for step in (4, 8, 12)]
    assert "\x1b" not in "".join(lines)


def test_plain_lines_are_not_one_per_step(tmp_path, capsys):
    with Display(every=3600.0) as display:
        run(tmp_path, on_event=display)
    assert sum("tokens/s" in line for line in capsys.readouterr().err.splitlines()) == 1


def test_bar_shows_steps_loss_and_speed(tmp_path, capsys):
    text = shown(tmp_path, capsys, terminal=True)
    assert "12/12" in text
    assert "loss " in text
    assert "bits/byte" in text
    assert "tokens/s" in text
    assert "\x1b[?25h" in text  # the cursor is back


def test_damage_and_resume_are_said(tmp_path, capsys):
    with pytest.raises(Stop):
        run(tmp_path, on_event=stop_after("train", 10))
    (tmp_path / "checkpoints" / "step-00000008" / "rng.safetensors").write_bytes(b"")
    text = shown(tmp_path, capsys, terminal=False)
    assert "warning: checkpoint step-00000008 is damaged (rng.safetensors is damaged" in text
    assert "going on from step 4 instead" in text
    assert "on from step 4, in" in text
