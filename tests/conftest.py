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
    """Build the kernels before any test is timed: on a fresh machine that takes seconds, once."""
    from residua.native.library import available

    available()


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
