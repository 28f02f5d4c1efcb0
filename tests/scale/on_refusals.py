"""Two processes that are refused, one reason after the other: on_refusals.py OUT. See `test_refusals.py`.

Rank 1 runs a copy of the package in which a line was added, as a machine does on which it was not updated.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


def other_code() -> None:
    """Let this process import another version of residua."""
    here = next(Path(folder) for folder in sys.path if (Path(folder) / "residua/__init__.py").exists())
    copy = OUT.parent / "copy"
    shutil.copytree(here / "residua", copy / "residua", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "residua/spec.py").open("a") as file:
        file.write("# newer\n")
    sys.path.insert(0, str(copy))


if RANK == 1:
    other_code()

from residua.cli.finetune import command  # noqa: E402
from residua.lab.train import train  # noqa: E402
from tests.train.harness import toy_config, toy_tokens  # noqa: E402

said = {}
try:
    train(toy_config(), OUT.parent / "run", tokens=toy_tokens(), parallel="dp=2")
except ValueError as error:
    said["code"] = str(error)
Path(f"{OUT}.{RANK}").write_text(json.dumps(said))
command("no/such/model", OUT.parent / "tuned", None, "auto", [], False)
