"""These tests need the hf extra; they are left out where it is missing, unless RESIDUA_REQUIRE names eval."""

import importlib.util
import os

required = "eval" in os.environ.get("RESIDUA_REQUIRE", "").split(",")
collect_ignore_glob = [] if required or importlib.util.find_spec("transformers") else ["test_*.py"]
