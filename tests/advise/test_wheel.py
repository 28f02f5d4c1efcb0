"""An installed package advises by the same evidence as the checkout, and says what it cannot do."""

import json
import os
import subprocess
import sys

import pytest

from residua.lab.advise.evidence import measured, result_files, results_folder, solved
from residua.lab.advise.literature import published
from tests.native.test_wheel import wheel

ASK = """
import json, sys
import residua
from residua.lab.advise.evidence import cited, measured, result_files, results_folder, solved
from residua.lab.advise.literature import published
from residua.lab.bench import record
from residua.lab.checkout import checkout
folder = results_folder()
assert checkout() is None
try:
    record.check(["attend"])
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "file": residua.__file__,
    "cited": [cited(file, folder) for file in result_files(folder)],
    "rows": [one.to_json() for one in (*published(), *measured(folder))],
    "tasks": [str(one) for one in solved(folder)],
    "refused": refused,
}))
"""


@pytest.mark.slow
def test_installed_package_cites_what_the_checkout_cites(tmp_path):
    made = wheel(tmp_path, CC="/no/such/compiler")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(made)], check=True, capture_output=True)
    (tmp_path / "results" / "mine").mkdir(parents=True)  # of the user's own, and none of our evidence
    (tmp_path / "results" / "mine" / "results.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, folder = json.loads(done.stdout), results_folder()
    assert found["file"].startswith(str(site))
    assert found["cited"] == [f"results/{file.relative_to(folder).as_posix()}" for file in result_files(folder)]
    assert found["rows"] == [one.to_json() for one in (*published(), *measured(folder))]
    assert found["tasks"] == [str(one) for one in solved(folder)]
    assert "measure from a checkout" in found["refused"]
