"""Sinks get every line under stable names, go on after a resume, and say what to install when they are missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from residua.lab.train.sinks import SINKS, make_sinks, scalars
from tests.train.harness import Stop, run, stop_after, toy_config

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


class Recorder:
    """Stands in for all three packages: it keeps how it was opened and what it was told."""

    def __init__(self):
        self.opened, self.told, self.closed = [], [], 0

    def open(self, *args, **options):
        self.opened.append((args, options))
        return SimpleNamespace(
            add_scalar=lambda name, value, step: self.told.append((step, name, value)),
            log=lambda values, step: self.told.extend((step, name, value) for name, value in values.items()),
            close=self.close,
            finish=self.close,
        )

    def close(self):
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch, request):
    found = Recorder()
    run = found.open()
    found.opened.clear()
    module = SimpleNamespace(SummaryWriter=found.open, init=found.open, log=run.log, finish=run.finish)
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, module)
    return found


@pytest.mark.parametrize("name", SINKS)
def test_sink_takes_every_line_and_goes_on_after_a_resume(tmp_path, recorder, name):
    config = toy_config(stream_rms=True)
    with pytest.raises(Stop):
        run(tmp_path / "a", config, track=[name], on_event=stop_after("train", 6))
    assert recorder.closed == 1
    run(tmp_path / "a", config, track=[name])
    assert (len(recorder.opened), recorder.closed) == (2, 2)
    by_name = {}
    for step, key, value in recorder.told:
        assert isinstance(value, int | float)
        by_name.setdefault(key, []).append(step)
    assert by_name["train/loss"] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 12]
    assert by_name["valid/bits_per_byte"] == [0, 4, 8, 12]
    assert by_name["valid/stream_rms/l1_mlp"] == [0, 4, 8, 12]
    assert "train/time/tokens_per_second" in by_name
    first, second = (options for _, options in recorder.opened)
    if name == "tensorboard":
        assert (first["purge_step"], second["purge_step"]) == (None, 5)
    else:
        assert first == second  # one run, gone on with
        assert first["resume"] == "allow"
        assert first["config"] == config.to_json()


@pytest.mark.parametrize("name", SINKS)
def test_missing_sink_names_the_cure_and_writes_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ImportError, match=r"pip install 'residua\[track\]'"):
        run(tmp_path / "a", track=[name])
    assert not (tmp_path / "a").exists()


def test_sinks_of_one_name_are_one(tmp_path, recorder):
    assert len(make_sinks(["wandb", "wandb", "trackio"], tmp_path, toy_config())) == 2


def test_scalars_leave_text_out():
    line = {"kind": "train", "step": 3, "loss": 1.5, "batch": "00ff", "time": {"seconds": 2.0}}
    assert scalars(line) == {"train/loss": 1.5, "train/time/seconds": 2.0}
