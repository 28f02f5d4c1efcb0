"""`residua designs`, `residua doctor`, `--version`, and what a mistake gets."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import residua
from residua.cli import app
from tests.refusals.harness import residua as typed

runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_version_is_the_package_version():
    assert run("--version") == f"residua {residua.__version__}\n"


def test_designs_lists_every_design_in_the_order_of_the_docs():
    rows = json.loads(run("designs", "--json"))
    assert [row["design"] for row in rows] == list(residua.names())
    for row in rows:
        assert row["equation"] == residua.design(row["design"]).__doc__.strip().splitlines()[0]
        assert row["paper"]
        assert row["sources"] != "not said"
    by_name = {row["design"]: row for row in rows}
    assert by_name["attnres"]["parameters_added"] == 2 * 768 * 24  # a query and a gain at all sites but the first
    assert by_name["attnres"]["state_per_token"] == 25 * 768
    assert by_name["denseformer"]["parameters_added"] == 12 * 15 // 2
    assert by_name["standard"] | {"state_per_token": 768, "parameters_added": 0} == by_name["standard"]


@pytest.mark.slow
def test_designs_table_holds_the_same_numbers():
    table = run("designs", "--width", "64", "--depth", "3")
    for row in json.loads(run("designs", "--width", "64", "--depth", "3", "--json")):
        line = next(line for line in table.splitlines() if line.strip().startswith(row["design"] + " "))
        assert f"{row['parameters_added']:,}" in line
        assert f"{row['state_per_token'] / 64:g} d" in line


def test_designs_shows_one_in_full():
    page = run("designs", "delta:blocks=2", "--depth", "2", "--width", "16")
    found = json.loads(run("designs", "delta:blocks=2", "--depth", "2", "--width", "16", "--json"))
    assert found["options"]["gate"] == {"takes": "none|scalar|vector|alpha", "default": "none", "here": "none"}
    assert found["sites"]["l1_attn"]["reads"] == ["embed", "block0"]
    assert found["text"] in page
    for site in found["sites"]:
        assert site in page


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_doctor_tells_versions_kernels_and_cures(build, monkeypatch):
    """Also which build of torch it is, whatever the version of the package says of it."""
    import torch

    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + build)
    found = json.loads(run("doctor", "--json"))
    assert found["core"]["torch"] == torch.__version__
    assert found["kernels"] == residua.ops.kernels()
    text = run("doctor")
    assert "pip install 'residua[triton]'" in text or found["extras"]["triton"]["triton"]
    assert found["cache"]["path"] in text


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["designs", "detla"], "did you mean 'delta'"),
        (["designs", "delta:gate=x"], "none|scalar|vector|alpha"),
        (["designs", "--layout", "attn,ffn"], "choose from attn"),
        (["designs", "--depth", "0"], "at least one block"),
    ],
    ids=str,
)
def test_mistake_is_one_line_and_exit_code_two(arguments, cure):
    done = typed(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert cure in done.err


def test_command_is_one_file(tmp_path):
    """A file in the folder with a function `command` is a command."""
    code = """
import sys, residua.cli as cli, pkgutil
names = {found.name for found in pkgutil.iter_modules(cli.__path__) if not found.name.startswith("_")}
assert names == {command.name for command in cli.app.registered_commands}, names
"""
    subprocess.run([sys.executable, "-c", code], check=True)
