"""`residua report`: a page or one clear line."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # processes of their own


def residua(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-c", "from residua.cli import main; main()", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_command_writes_the_page_and_names_it(compared, tmp_path, html):
    done = residua("report", compared, "-o", "out/page.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report: out/page.html\n"
    assert (tmp_path / "out/page.html").read_text() == html


def test_command_prints_json(compared, tmp_path, data):
    done = residua("report", compared, "--json", "--no-checkpoints", folder=tmp_path)
    found = json.loads(done.stdout)
    assert found["curves"] == json.loads(json.dumps(data["curves"]))
    assert found["routing"][1]["tokens"] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "neither a comparison nor a run"),
        (["--prompt", "", "."], "prompt is empty"),
    ],
)
def test_command_refuses_in_one_line_and_writes_nothing(arguments, says, tmp_path):
    done = residua("report", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
