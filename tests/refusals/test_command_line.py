"""Every row of the table of refusals on the command line."""

import shlex

import pytest

from tests.refusals import command_line
from tests.refusals.harness import check_refused, lying, residua


@pytest.mark.parametrize(("command", "words"), command_line.ROWS, ids=[row[0] for row in command_line.ROWS])
def test_refusal(place, command, words):
    before = lying(place)
    check_refused(residua(*shlex.split(command)), words)
    assert lying(place) == before, "something was written"


def test_rows_are_distinct():
    commands = [command for command, _ in command_line.ROWS]
    assert len(set(commands)) == len(commands)
