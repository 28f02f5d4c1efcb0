"""What the command line imports before it answers: help and the table of designs come without torch."""

import json
import resource
import subprocess
import sys

import pytest

import residua
from residua import Plan
from residua.cli import _table, app, designs

HELP, TABLE = 0.5, 2.0
"""Seconds that each may take, as the processor counts them."""

ASK = """
import json, sys
from typer.testing import CliRunner
from residua.cli import app

found = {}
for name in [None, *(command.name for command in app.registered_commands)]:
    result = CliRunner().invoke(app, [name, "--help"] if name else ["--help"])
    found[name or "residua"] = result.exit_code == 0 and "Usage" in result.output and "torch" not in sys.modules
table = CliRunner().invoke(app, ["designs"])
found["table"] = table.exit_code == 0 and "attnres" in table.output and "torch" not in sys.modules
print(json.dumps(found))
"""


def seconds(*arguments: str) -> float:
    """Processor seconds of one process, beyond those of a Python that does nothing."""

    def spent(line: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *line], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(spent(["-m", "residua", *arguments]) for _ in range(2)) - spent(["-c", ""])


def test_help_of_every_command_and_the_table_need_no_torch():
    found = json.loads(subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout)
    assert len(found) == len(app.registered_commands) + 2
    assert not [name for name, right in found.items() if not right]


@pytest.mark.parametrize(("arguments", "limit"), [(("--help",), HELP), (("designs",), TABLE)], ids=str)
def test_answers_come_at_once(arguments, limit):
    assert seconds(*arguments) < limit


def test_shipped_table_is_what_would_be_counted():
    plan = Plan.regular(*_table.COUNTED)
    rows = _table.shipped(*_table.COUNTED)
    assert rows is not None, "run tools/update_readme"
    assert [row["design"] for row in rows] == list(residua.names())
    for row in rows[:3]:
        assert row == designs.describe(row["design"], plan)


def test_shipped_table_is_left_alone_when_a_source_changed(monkeypatch):
    monkeypatch.setattr(_table, "source_digest", lambda: "of other sources")
    assert _table.shipped(*_table.COUNTED) is None


def test_shipped_table_is_for_its_own_counts_alone():
    assert _table.shipped(64, 12, "attn,mlp") is None
