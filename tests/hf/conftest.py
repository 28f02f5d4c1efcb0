"""These tests need the hf extra; they are left out where it is missing, unless RESIDUA_REQUIRE names eval."""

import importlib.util
import os
from pathlib import Path

import pytest

required = "eval" in os.environ.get("RESIDUA_REQUIRE", "").split(",")
collect_ignore_glob = [] if required or importlib.util.find_spec("transformers") else ["test_*.py"]


def pytest_collection_modifyitems(items):
    """Slow, all of them: transformers alone takes seconds to import, in every worker."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
