"""tools/setup says what is missing before it starts, and installs nothing twice."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def setup(folder, *groups, **environment):
    return subprocess.run(
        [sys.executable, "tools/setup", *groups], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"RESIDUA_REQUIRE": "", "RESIDUA_FREE_GIB": "9"} | environment,
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path):
    """What the script needs of a fresh clone."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools" / "setup")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def fake(clone):
    """A clone whose .venv looks whole, and whose Python notes what pip would do: one line a call."""
    script = clone / ".venv" / "bin" / "python"
    script.parent.mkdir(parents=True)
    (script.parent / "activate").write_text(str(clone / ".venv"))
    script.write_text(
        '#!/bin/sh\ncd "${0%/*}/../.."\ncase "$*" in *--dry-run*) exec cat report;; esac\n'
        'echo "$@" >> log\n[ ! -e broken ]\n'
    )
    script.chmod(0o755)
    return clone


@pytest.mark.parametrize(
    ("groups", "environment", "said"),
    [
        (["core"], {"RESIDUA_FREE_GIB": "0.5"}, "0.5 GiB of disk are free"),
        (["docs"], {}, "no group named 'docs'"),
        (["core"], {"RESIDUA_REQUIRE": "gpu"}, "RESIDUA_REQUIRE names 'gpu'"),
    ],
)
def test_trouble_is_one_line_and_nothing_is_made(clone, groups, environment, said):
    done = setup(clone, *groups, **environment)
    assert done.returncode != 0
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


CUDA = 'cuda-toolkit[cublas]==13.0.3; platform_system == "Linux"', "nvidia-nccl-cu13==2.29.7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has two builds under one version")
@pytest.mark.parametrize(
    ("required", "free", "enough"),
    [((), "4.5", True), ((), "3.5", False), (CUDA, "4.5", False), (CUDA, "7.5", False), (CUDA, "8.5", True)],
)
def test_room_is_asked_for_by_the_build_that_pip_takes(fake, required, free, enough):
    """The CUDA build and its libraries are twice as large as the CPU build; pip is asked before it installs any."""
    found = {"install": [{"metadata": {"name": "torch", "requires_dist": ["sympy>=1.13.3", *required]}}]}
    (fake / "report").write_text(json.dumps(found))
    done = setup(fake, "core", RESIDUA_FREE_GIB=free)
    assert (done.returncode == 0, (fake / "log").exists()) == (enough, enough)
    if not enough:
        build, needed = ("CUDA", 8) if required else ("CPU", 4)
        assert done.stderr.count("\n") == 1
        assert f"{free} GiB of disk are free" in done.stderr
        assert f"about {needed} GiB are needed for PyTorch (its {build} build)" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has two builds under one version")
def test_pip_that_cannot_say_which_build_is_left_to_fail_by_itself(fake):
    (fake / "broken").touch()
    done = setup(fake, "core", RESIDUA_FREE_GIB="6")
    assert done.returncode != 0
    assert "pip failed" in done.stderr


def test_old_python_gets_a_sentence_and_not_a_syntax_error(clone):
    script = (clone / "tools" / "setup").read_text()
    (clone / "tools" / "setup").write_text(script.replace("OLDEST_PYTHON = (3, 11)", "OLDEST_PYTHON = (9, 9)"))
    done = setup(clone, "core")
    assert "Python 9.9 or newer is needed" in done.stderr
    assert not (clone / ".venv").exists()


def test_second_run_installs_nothing():
    """In this checkout, which ran it to get here, with the same requirements."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.fail("run the tests through make: they belong to .venv")
    done = setup(ROOT, "dev", RESIDUA_REQUIRE=os.environ.get("RESIDUA_REQUIRE", ""))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def declare(folder, line):
    text = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(re.sub('"transformers[^"]*"', f'"{line}"', text))


@pytest.mark.parametrize("line", ["transformers>=5.21.3", "transformers>=5.21.3,<6"])
def test_oldest_release_is_the_declared_one_and_goes_to_its_own_folder(fake, line):
    declare(fake, line)
    done = setup(fake, "core", RESIDUA_REQUIRE="oldest")
    assert done.returncode == 0, done.stderr
    calls = (fake / "log").read_text()
    assert calls.endswith(f"--no-deps --target {fake}/.venv/oldest transformers==5.21.3\n")
    assert calls.count("--target") == 1
    again = setup(fake, "core", RESIDUA_REQUIRE="oldest")
    assert (again.returncode, again.stdout, (fake / "log").read_text()) == (0, "", calls)


def test_engines_go_to_a_folder_of_their_own_at_pinned_versions(fake):
    """Without what they declare: it would replace versions that the rest is tested with."""
    done = setup(fake, "core", RESIDUA_REQUIRE="engines")
    assert done.returncode == 0, done.stderr
    last = (fake / "log").read_text().splitlines()[-1]
    assert f"--no-deps --target {fake}/.venv/engines torchtitan==" in last
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    assert set(last.partition("/engines ")[2].split()) <= pins


def test_oldest_release_needs_a_lower_bound(fake):
    declare(fake, "transformers<6")
    done = setup(fake, "oldest")
    assert done.returncode != 0
    assert "transformers>=" in done.stderr
    assert not (fake / ".venv" / ".residua-oldest").exists()


def test_interrupted_install_is_done_again(fake):
    """Also where an earlier one had been finished: what broke off is not taken for it."""
    assert setup(fake, "oldest").returncode == 0
    before = (fake / "pyproject.toml").read_text()
    declare(fake, "transformers>=5.21.3")
    (fake / "broken").touch()
    half = fake / ".venv" / "oldest" / "half"
    half.mkdir(parents=True)
    assert setup(fake, "oldest").returncode != 0
    (fake / "broken").unlink()
    (fake / "pyproject.toml").write_text(before)
    calls = (fake / "log").read_text()
    assert setup(fake, "oldest").returncode == 0
    assert "--target" in (fake / "log").read_text().removeprefix(calls)
    assert not half.exists()


def test_constraints_pin_torch_and_everything_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all("==" in line and "://" not in line for line in lines)
    build = (ROOT / "pyproject.toml").read_text().split("[project]")[0]
    assert "torch" not in build
