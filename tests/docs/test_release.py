"""The release checklist runs, and stops where something is not ready; hooks before a commit are targets of make."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import residua

ROOT = Path(__file__).resolve().parents[2]


def release(folder, *flags):
    command = [sys.executable, folder / "tools" / "release", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


@pytest.fixture
def checkout(tmp_path):
    """What the checks read, committed, with a section of the changelog that is dated."""
    for name in ("tools/release", "CITATION.cff", "src/residua/_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"## [{residua.__version__}] - 2026-01-01\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("notes.txt", "mine", "changes that are not committed"),
        ("CHANGELOG.md", f"## [{residua.__version__}] - unreleased\n", "date the section of this version"),
        ("CITATION.cff", "version: 0.0.0\n", "change its line `version`"),
    ],
    ids=["dirty", "undated", "cited"],
)
def test_release_stops_before_it_builds(checkout, name, text, said):
    (checkout / name).write_text(text)
    if name != "notes.txt":
        change = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "b"]
        subprocess.run(["git", *change], cwd=checkout, check=True)
    done = release(checkout)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (checkout / "dist").exists()


@pytest.mark.slow
def test_release_can_be_rehearsed():
    """Build, twine check, install and smoke test, for real, of the last commit."""
    if not (ROOT / ".git").exists():
        pytest.fail("the checklist releases a commit: run the tests in a clone")
    done = release(ROOT, "--rehearse")
    assert done.returncode == 0, done.stderr
    for step in (f"residua-{residua.__version__}.tar.gz", "twine check: passed", "the smoke test passed"):
        assert step in done.stdout


def test_hooks_before_a_commit_are_the_targets_of_make():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == ["make lint", "make types"]
    assert all(f"\n{hook['id']}:" in (ROOT / "Makefile").read_text() for hook in local["hooks"])
