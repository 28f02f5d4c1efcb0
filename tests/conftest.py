"""Every test: seeds, one thread, fresh memory poisoned with NaN, and required tools that must not be skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

OLDEST, ENGINES = Path(sys.prefix) / "oldest", Path(sys.prefix) / "engines"
CURES = {
    "arm": (
        "a compiler and an emulator of arm64",
        "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user",
    ),
    "browser": ("chromium and playwright", "apt-get install chromium && make setup"),
    "clang": ("clang", "apt-get install clang"),
    "clients": ("transformers' server and onnxruntime", "RESIDUA_REQUIRE=clients make setup"),
    "cluster": ("ray", "RESIDUA_REQUIRE=cluster make setup"),
    "engines": ("torchtitan and Lightning", "RESIDUA_REQUIRE=engines make setup"),
    "eval": ("lm-eval and transformers", "RESIDUA_REQUIRE=eval make setup"),
    "oldest": ("the oldest transformers declared", "RESIDUA_REQUIRE=oldest make setup"),
}

LONG = (
    "contract/test_laws.py", "contract/test_graphs.py", "compare/test_pool_slurm.py", "compare/test_pool_ray.py",
    "scale/test_pipeline.py", "scale/test_faults.py", "hf/test_oldest.py", "compare/test_orphans.py",
    "scale/test_sharded.py", "native/test_sanitized.py", "native/test_other_processors.py", "hf/test_types.py",
    "scale/test_split.py", "scale/test_train.py", "cost/test_ranks.py", "hf/test_contract.py",
    "ops/test_triton_interpreted.py", "report/test_browser.py", "docs/test_notebook.py", "docs/test_release.py",
    "scale/test_four.py", "integrations/test_hf_ranks.py", "compare/test_end_to_end.py", "test_house.py",
    "docs/test_examples.py", "native/test_wheel.py",
)  # fmt: skip
"""The files that take longest, which begin first: one that begins last keeps one processor busy and the others idle."""


def missing(tool: str) -> bool:
    """Whether what a mark needs is absent."""
    if tool == "browser":
        return not shutil.which("chromium") or importlib.util.find_spec("playwright") is None
    if tool in ("arm", "clang"):
        return not all(map(shutil.which, ("aarch64-linux-gnu-gcc", "qemu-aarch64") if tool == "arm" else ("clang",)))
    if tool == "oldest":
        return not (OLDEST / "transformers").is_dir()
    if tool == "engines":
        return not (ENGINES / "torchtitan").is_dir()
    needed = {
        "clients": ("fastapi", "openai", "onnxruntime", "onnxscript"),
        "cluster": ("ray",),
        "eval": ("lm_eval", "transformers"),
    }
    return any(importlib.util.find_spec(name) is None for name in needed[tool])


def pytest_configure(config: pytest.Config) -> None:
    for tool, (what, _) in CURES.items():
        config.addinivalue_line("markers", f"{tool}: needs {what}")


def pytest_sessionstart() -> None:
    """Build the kernels before any test is timed: on a fresh machine that takes half a minute, once. Processes of tests
    that have a cache of their own take the same binary."""
    from residua.native.library import status

    if built := status()["binary"]:
        os.environ["RESIDUA_NATIVE"] = built


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--no-loadscope-reorder` keeps this order; without it, files with many tests begin first."""
    here = Path(__file__).parent
    place = {here / name: turn for turn, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = {name.strip() for name in os.environ.get("RESIDUA_REQUIRE", "").split(",")}
    for tool, (what, cure) in CURES.items():
        if item.get_closest_marker(tool) and missing(tool):
            message = f"needs {what}: {cure}"
            if tool in required:
                pytest.fail(f"RESIDUA_REQUIRE names {tool}, but this test {message}", pytrace=False)
            pytest.skip(message)


@pytest.fixture(autouse=True)
def _clean_slate():
    """Uninitialised memory is NaN, so that a result which reads it cannot look right by chance."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
