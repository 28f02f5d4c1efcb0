"""Ctrl-C and SIGTERM: the step is finished, saved, said; the same command goes on to the same end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from residua.lab.train import Interrupted
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.interrupt import Interrupts
from tests.train.harness import outcome, run


def send(number, kind, step):
    def listen(event):
        if (event["kind"], event["step"]) == (kind, step):
            os.kill(os.getpid(), number)

    return listen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("kind", "step"), [("start", 0), ("valid", 0), ("train", 3), ("valid", 4), ("saved", 8)])
def test_signal_saves_and_the_run_goes_on_to_the_same_end(tmp_path, number, kind, step):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        run(tmp_path / "stopped", on_event=send(number, kind, step))
    assert signal.getsignal(number) is before
    assert caught.value.step == step
    assert caught.value.exit_code == 128 + number
    assert f"stopped by {number.name} after step {step} of 12, saved as" in str(caught.value)
    assert "run the same command to continue" in str(caught.value)
    assert checkpoints.steps(tmp_path / "stopped" / "checkpoints")[-1] == step
    run(tmp_path / "stopped")
    run(tmp_path / "whole")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_closed_terminal_saves_like_a_signal_to_end(tmp_path):
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # the tests themselves may run under nohup
    try:
        with pytest.raises(Interrupted) as caught:
            run(tmp_path / "stopped", on_event=send(signal.SIGHUP, "train", 3))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.value.exit_code == 128 + signal.SIGHUP
    assert checkpoints.steps(tmp_path / "stopped" / "checkpoints")[-1] == 3
    run(tmp_path / "stopped")
    run(tmp_path / "whole")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_signal_that_is_ignored_stays_ignored():
    """As of a command that was started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.caught is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_is_heard_in_the_background_too():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.caught == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_in_the_last_step_changes_nothing(tmp_path):
    run(tmp_path / "stopped", on_event=send(signal.SIGTERM, "train", 12))
    run(tmp_path / "whole")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@pytest.fixture
def python_handles_sigint():
    """A shell starts what it runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_signal_does_not_wait(python_handles_sigint):
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.caught == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_training_works_in_a_thread(tmp_path):
    results = []
    worker = threading.Thread(target=lambda: results.append(run(tmp_path)))
    worker.start()
    worker.join()
    assert results[0].steps == 12
