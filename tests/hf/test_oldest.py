"""The oldest transformers that the hf extra declares, in the folder where tools/setup puts it: Llama, Qwen3 and GPT-2.

Covered there: the whole contract (identity, keys, round trip, caches, padding, checkpointing, eager and sdpa, one
graph), citizenship (half precision, shards, devices, Trainer, LoRA, classifiers), what storage accepts and refuses, and
registration with the Auto classes. Everything else around transformers is what .venv holds.
"""

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import residua
from residua.hf.anatomy import ANATOMY
from tests.conftest import OLDEST

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CODE = Path(residua.__file__).parents[1]

ARCHITECTURES = ("llama", "qwen3", "gpt2")
FILES = ("test_contract", "test_citizenship", "test_storage", "test_registration")
ORDERS = "test_registration.py::test_saved_model_loads_after_importing_residua"
LEFT_OUT = [f"{ORDERS}[residua first]", f"{ORDERS}[residua between]"]
"""Of three orders of imports, a process each, the last is tried here: that of a user who adds residua to a script."""
# The release is read where the tests ran, after them: it is the one that they used.
RUN = """
import sys, pytest
code = pytest.main(sys.argv[1:])
import transformers
print(transformers.__version__, transformers.__file__)
sys.exit(code)
"""


def declared():
    """The lower bound of transformers in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (each for each in map(Requirement, extras["hf"]) if each.name == "transformers")
    (bound,) = (each.version for each in wanted.specifier if each.operator == ">=")
    return Version(bound)


@pytest.mark.oldest
def test_oldest_release_passes(tmp_path):
    others = " or ".join(set(ANATOMY) - set(ARCHITECTURES))
    done = subprocess.run(
        [
            sys.executable, "-c", RUN, "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
            "--basetemp", str(tmp_path / "inner"), "--junitxml", str(tmp_path / "ran.xml"), "-k", f"not ({others})",
            *(part for name in LEFT_OUT for part in ("--deselect", f"tests/hf/{name}")),
            *(str(HERE / f"{name}.py") for name in FILES),
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(OLDEST), str(CODE)])}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    version, place = done.stdout.splitlines()[-1].split(" ", 1)
    assert Version(version) == declared()
    assert OLDEST in Path(place).parents
    ran = list(ElementTree.parse(tmp_path / "ran.xml").iter("testcase"))
    assert not [each.get("name") for each in ran if len(each)], "failed or skipped"
    assert {each.get("classname") for each in ran} == {f"tests.hf.{name}" for name in FILES}
    for architecture in ARCHITECTURES:
        assert sum(architecture in each.get("name") for each in ran) > 15, f"hardly a test ran on {architecture}"
