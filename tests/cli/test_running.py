"""How a run that stops short ends, for every command that trains."""

import pytest
import typer

from residua.cli._flags import running
from residua.lab.train import Diverged, Interrupted


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (Interrupted(15, 3, 9, "step-3"), 143),
        (Diverged(3, "0.mlp", "the loss is nan"), 1),
        (ImportError("trackio is not usable"), 1),
    ],
    ids=["told to", "broken", "tracker missing"],
)
def test_running_turns_a_stop_into_a_line_and_an_exit_code(stop, code, tmp_path, capsys):
    with pytest.raises(typer.Exit) as left, running(tmp_path):
        raise stop
    assert left.value.exit_code == code
    assert capsys.readouterr().err.splitlines()[-1] == f"residua: {stop}"


def test_running_leaves_other_errors_alone(tmp_path):
    with pytest.raises(ValueError, match="mine"), running(tmp_path):
        raise ValueError("mine")


def test_running_needs_a_directory():
    with pytest.raises(ValueError, match="--out is missing"), running(None):
        pytest.fail("nothing may run")
