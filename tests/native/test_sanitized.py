"""The same C under AddressSanitizer and UndefinedBehaviorSanitizer: edge cases touch no byte that is not theirs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from residua.native import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EDGES = {
    "tests/ops/test_native_ops.py": "equals_the_reference and (float32-avx or bfloat16 or float64-portable)"
    " or no_tokens or any_layout or threads",
    "tests/ops/test_attend_kernel.py": "equals_the_definition and not linear or pass_the_cache or any_view or no_tokens"
    " or subset or threads or weights_of_the_kernel or onto_is",
    "tests/ops/test_attend_groups.py": "merge_equal or not_wanted or together",
    "tests/ops/test_attend_large.py": "300 and 18",
    "tests/ops/test_strides.py": "layout",
    "tests/ops/test_decoding_ops.py": "float32-avx or bfloat16-portable or layout or threads",
}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The library with its sanitizers, and the environment that a Python needs to load it."""
    target = tmp_path_factory.mktemp("sanitized") / "kernels.so"
    command = build.compiler()
    build.compile_to(target, command, FLAGS)
    runtime = subprocess.run(
        [*command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Python itself keeps memory to the end, so leaks say nothing
    settings = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "RESIDUA_NATIVE": str(target)}
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "RESIDUA_STRICT": "1", **settings}


def run(environment, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def test_sanitizers_find_nothing_in_the_edge_cases(sanitized):
    """In one process, because a sanitized Python takes seconds to import torch."""
    chosen = " or ".join(f"{Path(file).stem} and ({edges})" for file, edges in EDGES.items())
    found = run(sanitized, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", *EDGES, "-k", chosen)
    assert found.returncode == 0, (found.stdout + found.stderr)[-4000:]
    for file in EDGES:
        assert re.search(rf"{re.escape(file)}::.* PASSED", found.stdout), f"nothing ran of {file}"


@pytest.mark.parametrize(
    ("width", "fault"),
    [(19, ""), (20, "heap-buffer-overflow")],
    ids=["true-width", "one-number-too-wide"],
)
def test_sanitizers_would_find_an_overflow(sanitized, width, fault):
    """One number past the end of a source: the check above could have failed."""
    code = f"""
import ctypes, torch
from residua.native.library import entry, pointers
source, out, weight = torch.ones(19), torch.ones(20), torch.ones(1)
call = entry("residua_mix", *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 7, ctypes.c_int)
call(0, 1, pointers([source]), weight.data_ptr(), out.data_ptr(), 1, 1, 1, {width}, 0, 1, 0, 1)
"""
    found = run(sanitized, "-c", code)
    assert (found.returncode != 0) == bool(fault), found.stderr[-2000:]
    assert fault in found.stderr
