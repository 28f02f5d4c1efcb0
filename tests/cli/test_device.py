"""Commands for a GPU, up to the GPU: what is missing is said in one line. What they do with one runs on Triton's
interpreter, in tests/ops/triton_command.py."""

import sys

import pytest
import torch

from residua.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process: exit code, output and errors."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["residua", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.mark.parametrize("command", ["doctor", "bench"])
@pytest.mark.parametrize(("built", "said"), [(None, "is built without CUDA"), ("13.0", "finds no GPU")])
def test_a_missing_gpu_is_said_in_one_line(command, built, said, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    code, out, error = run(command, "--device", "cuda")
    assert code == 2
    assert out == ""
    (line,) = error.splitlines()
    assert line.startswith("residua: --device cuda: there is no such device here: torch ")
    assert line.endswith(said)


def test_a_gpu_is_measured_whole(run):
    code, _, error = run("bench", "ops", "--device", "cuda")
    assert code == 2
    assert "measures everything; leave out 'ops'" in error


def test_other_devices_have_no_kernels(run):
    code, _, error = run("doctor", "--device", "mps")
    assert code == 2
    assert "for cuda" in error


def test_tables_and_a_wrong_kernel_reach_the_file_and_the_exit_code(run, monkeypatch, tmp_path):
    """With the measurements, which need a GPU, replaced by one row that is wrong."""
    from residua.lab.bench import record
    from residua.lab.gpu import check, measure

    row = {"case": "attend", "dtype": "float32", "shape": "2x4x1", "output": 0.5, "gradient": None, "reason": "off"}
    monkeypatch.setattr(check, "require", torch.device)
    monkeypatch.setattr(check, "check", lambda device: [row])
    monkeypatch.setattr(measure, "describe", lambda device: {"name": "a GPU"})
    monkeypatch.setattr(measure, "measure", lambda device, sizes, tell: {"device": {"name": "a GPU"}, "check": [row]})
    code, out, _ = run("bench", "--device", "cuda", "--out", str(tmp_path / "gpu.json"))
    assert code == 1
    assert "attend float32 2x4x1: off" in out
    assert record.read(tmp_path / "gpu.json")["check"] == [row]
    code, out, _ = run("doctor", "--device", "cuda")
    assert code == 1
    assert "attend float32 2x4x1: off" in out
