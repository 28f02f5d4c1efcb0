"""The Triton kernels equal their references: every `triton_<op>.py`, run in one process of their own.

TRITON_INTERPRET must be set before triton is imported, and would follow every later test of this process. Where there
is a GPU the same tests run on it, compiled.
"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from residua import ops
from residua.ops import _backend, _triton_registry

HERE = Path(__file__).parent
CASES = sorted(file.stem for file in HERE.glob("triton_*.py") if file.stem != "triton_check")


@pytest.mark.slow
def test_triton_kernels_equal_their_reference():
    pytest.importorskip("triton")
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    files = [str(HERE / f"{cases}.py") for cases in CASES]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for cases in CASES:
        assert re.search(rf"{cases}\.py::.* PASSED", done.stdout), f"nothing ran of {cases}"


def test_every_triton_kernel_has_cases():
    """Compared with float64 by `residua doctor --device`, compiled ahead of time, and in the files beside this one."""
    from residua.lab.gpu.cases import CASES as known

    assert {case.op for case in known} | {"attend_merge"} == set(_triton_registry.SERVED)  # groups are merged
    text = "".join((HERE / f"{cases}.py").read_text() for cases in CASES)
    assert all(op.removeprefix("attend_") in text for op in _triton_registry.SERVED)


@pytest.fixture
def device():
    """A device of no other kernel, to register on."""
    yield "meta"
    for op in _triton_registry.SERVED:
        _backend.forget(op, "meta")


def test_triton_missing_is_said_with_its_cure(device, monkeypatch):
    monkeypatch.setattr(_triton_registry.importlib.util, "find_spec", lambda name: None)
    _triton_registry.register(device)
    source = torch.zeros(1, 1, 2, device=device)
    with ops.backend("auto", strict=True), pytest.raises(RuntimeError, match=r"pip install 'residua\[triton\]'"):
        ops.mix(torch.ones(1, device=device), (source,))
    with ops.backend("auto", strict=False), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert ops.mix(torch.ones(1, device=device), (source,)).shape == source.shape
    assert len(said) == 1


def test_registering_imports_no_triton_registry(device):
    code = """
import sys
import residua
from residua.ops import _triton_registry, kernels
_triton_registry.register("meta")
assert kernels()["attend"]["meta"] == "triton"
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
