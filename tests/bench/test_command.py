"""`residua bench` end to end, and its gate."""

import json
import subprocess
import sys

import pytest
import torch

from residua.cli import main
from residua.lab.bench import record

pytestmark = pytest.mark.slow


def bench(*arguments, check=True):
    """The command in a process of its own, which starts itself again with its allocator set."""
    code = "from residua.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", *arguments], capture_output=True, text=True, check=check
    )


@pytest.fixture
def here(monkeypatch, capsys):
    """The command in this process, as it is: exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["residua", "bench", *arguments, "--as-is"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_ops_are_measured_and_recorded(tmp_path):
    out = tmp_path / "ops.json"
    ran = bench(
        "ops", "--op", "remix", "--shape", "32x16", "-n", "2", "--no-compiled", "--seconds", "0.05", "-o", str(out)
    )
    assert "remix 32x16" in ran.stdout
    found = record.read(out)
    assert found["command"].startswith("residua bench ops")
    assert "glibc.malloc" in found["regime"]["allocator"]
    assert found["regime"]["pinned"] == 1
    assert any("test_remix" in name for name in found["tests"])
    assert [row["op"] for row in found["ops"]["rows"]] == ["remix"]


@pytest.mark.parametrize(
    ("arguments", "kind", "keys"),
    [
        (("stack", "--depth", "2", "--depth", "3", "--width", "16", "--tokens", "8"), "stack", {"types"}),
        (("profile", "--depth", "2", "--width", "16", "--tokens", "8"), "profile", {"forms", "bytes_per_second"}),
        (("memory", "--depth", "2", "--depth", "3", "--width", "8", "-d", "delta:blocks=4"), "memory", {"lengths"}),
        (("decode", "--depth", "1", "--width", "64", "-d", "delta"), "decode", {"read", "ring", "model", "converted"}),
        (
            ("model", "--depth", "1", "--width", "16", "--tokens", "8", "-d", "delta", "--pairs", "5"),
            "model",
            {"ratios", "machinery", "served", "control"},
        ),
    ],
)  # fmt: skip
def test_kinds_print_json(arguments, kind, keys, here):
    code, out, error = here(*arguments, "--seconds", "0.05", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert keys <= found[kind].keys()
    assert found["regime"]["sources"] == record.sources()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("speed",), "ops, stack, profile, model, memory, decode"),
        (("ops", "--op", "nothing"), "no op 'nothing'"),
        (("ops", "--op", "mix", "--shape", "12"), "TOKENSxWIDTH"),
        (("ops", "--dtype", "int8"), "float32, bfloat16"),
        (("model", "--depth", "1", "--depth", "2"), "one --depth"),
        (("ops", "--threads", "0"), "at least 1"),
        (("all",), "takes a directory"),
        (("all", "--out", "setup.py"), "is a file"),
        (("model", "--compile-only"), "give it to ops, compiled or all"),
    ],
)
def test_wrong_input_is_one_line(arguments, said, here):
    code, _, error = here(*arguments)
    assert code == 2
    assert said in error
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("residua: ")


def test_wrong_input_is_one_line_from_the_process_that_measures():
    ran = bench("ops", "--op", "nothing", check=False)
    assert ran.returncode == 2
    assert "no op 'nothing'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_gate_refuses_a_red_or_untested_op(tmp_path):
    folder = tmp_path / "tests" / "ops"
    folder.mkdir(parents=True)
    (folder / "test_good.py").write_text("def test_holds():\n    assert True\n")
    (folder / "test_bad.py").write_text("def test_breaks():\n    assert False\n")
    assert record.check(["good"], tmp_path) == {"good": ["tests/ops/test_good.py"]}
    with pytest.raises(ValueError, match="test_breaks"):
        record.check(["good", "bad"], tmp_path)
    with pytest.raises(ValueError, match="no tests of missing in"):
        record.check(["missing"], tmp_path)


def test_record_of_another_format_is_refused(tmp_path):
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="Measure again"):
        record.read(tmp_path / "old.json")


def test_compiled_steps_are_measured_beside_eager_ones(here, monkeypatch):
    """The command alone: what compiling itself makes of a design is tested with the operators."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    shape = ("--depth", "1", "--width", "16", "--tokens", "8", "--pairs", "5", "--seconds", "0.05")
    code, out, _ = here("compiled", "-d", "hyper", *shape, "--json")
    assert code == 0
    (found,) = json.loads(out)["compiled"]["designs"]
    assert found["design"] == "hyper"
    assert found["kernel_calls"] > 2  # forward and backward of every site
    assert found["ratios"].keys() == {"compiled", "fused"}
    assert here("compiled", "-d", "hyper", *shape, "--compile-only") == (0, "", "compiling hyper\n")
    code, out, _ = here("compiled", "-d", "hyper", "-d", "hyper:streams=2", *shape)
    assert code == 0
    (row,) = (line.split() for line in out.splitlines() if "hyper:streams=2" in line)
    assert row[3] == "-"  # its kernels were fused once
