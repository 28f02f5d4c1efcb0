"""Every row of the tables of refusals of files: damaged and foreign runs, and plans."""

import shlex
import shutil

import pytest

from tests.refusals import files
from tests.refusals.harness import check_refused, lying, residua


@pytest.mark.parametrize(
    ("harm", "command", "words"), [row[1:] for row in files.RUNS], ids=[row[0] for row in files.RUNS]
)
def test_run(place, tmp_path, harm, command, words):
    run = shutil.copytree(place / "run", tmp_path / "copy")
    harm(run)
    before = lying(tmp_path)
    check_refused(residua(*shlex.split(command.format(run=run))), words)
    after = lying(tmp_path)
    after.pop("copy/run.lock", None)  # taking the lock is how a run is looked at
    before.pop("copy/run.lock", None)
    assert after == before, "something was written"


@pytest.mark.parametrize(("text", "words"), files.PLANS, ids=[row[0] or "nothing" for row in files.PLANS])
def test_plan(place, tmp_path, text, words):
    (tmp_path / "plan.toml").write_text(text)
    check_refused(residua("compare", "--plan", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "new")), words)
    assert sorted(lying(tmp_path)) == ["plan.toml"]


def test_litter_of_file_managers_does_not_make_a_folder_taken(place, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".DS_Store").touch()
    said = residua("train", "--config", "run/config.json", "--out", str(tmp_path / "new"))
    assert said.code == 0, said.err
