"""The notebook runs from the first cell to the last, and shows a comparison, a conversion and its routing."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = nbformat.read(ROOT / "examples" / "residua.ipynb", as_version=4).cells


@pytest.mark.slow
def test_notebook_runs_and_shows_its_pictures():
    command = [sys.executable, "tools/update_notebook", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_notebook_is_committed_with_its_outputs():
    code = [cell for cell in CELLS if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    said = "\n".join(cell.source for cell in code)
    for shown in ("compare(plan", "residua.convert(", "record_routing("):
        assert shown in said
