"""`residua report`: a page or one clear line."""

import json

import pytest

from tests.refusals.harness import residua

pytestmark = pytest.mark.slow  # models are trained


@pytest.fixture(autouse=True)
def _there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_command_writes_the_page_and_names_it(compared, tmp_path, html):
    done = residua("report", str(compared), "-o", "out/page.html")
    assert done.code == 0, done.err
    assert done.out == "report: out/page.html\n"
    assert (tmp_path / "out/page.html").read_text() == html


def test_command_prints_json(compared, tmp_path, data):
    done = residua("report", str(compared), "--json", "--no-checkpoints")
    found = json.loads(done.out)
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
    done = residua("report", *arguments)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
