"""Whole steps of every design are traced on fake CUDA tensors: `cuda_traced.py`, in a process of its own.

PyTorch built without CUDA knows no such device; a library of a few lines, loaded before it, answers for one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture
def device(tmp_path):
    """The library that answers for a device; None where PyTorch knows one."""
    if torch.version.cuda is not None:
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler is needed: g++ or clang++"
    home, out = Path(torch.__file__).parent, tmp_path / "fake_cuda.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(HERE / "fake_cuda.cpp")]
    command += ["-o", str(out), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    subprocess.run(command, check=True)
    return out


@pytest.mark.slow
def test_steps_of_every_design_are_traced_on_a_fake_gpu(device):
    pytest.importorskip("triton")
    load = f"import ctypes; ctypes.CDLL({str(device)!r}); " if device else ""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / "cuda_traced.py")]
    code = f"{load}import sys, pytest; sys.exit(pytest.main({options!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
