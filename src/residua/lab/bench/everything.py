"""Every table of docs/speed.md in turn, each measured by a process of its own and written as soon as it is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from residua.lab.bench import record
from residua.lab.bench.timing import Measured

SUBJECTS: dict[str, tuple[str, ...]] = {
    "ops": ("attend", "mix", "delta_write", "remix", "window_attend"),
    "stack": ("attend",), "profile": ("attend",), "memory": ("attend", "delta_write", "native_ops"),
    "model": ("attend", "mix", "delta_write", "remix", "sinkhorn", "shortconv", "native_ops"),
    "decode": ("attend", "delta_write", "window_attend", "native_ops"), "plain": ("native_ops",),
    "compiled": ("operators",),
}  # fmt: skip
"""The ops whose tests must pass before a file is written; of `ops`, those that were measured."""

FILES: dict[str, tuple[str, ...]] = {
    "stack": ("stack",),
    "profile": ("profile",),
    "model": ("model",),
    "plain": ("plain",),
    "ops": ("ops",),
    "ops-bfloat16": ("ops", "--op", "attend", "-n", "4", "-n", "24", "-n", "64", "--dtype", "bfloat16"),
    "memory": ("memory",),
    "decode": ("decode",),
    "compiled": ("compiled",),
}
"""The files and what to give `residua bench` for each."""


COMPILING = ("ops", "compiled")
"""The kinds with compiled forms, whose graphs Inductor keeps in its cache."""


def subjects(measured: Measured) -> set[str]:
    """The ops that were measured."""
    if "ops" in measured:
        return {row["op"] for row in measured["ops"]["rows"]}
    return {subject for kind in measured.keys() & SUBJECTS.keys() for subject in SUBJECTS[kind]}


def measure(folder: Path, *, resume: bool, tell: Callable[[str], None], show: Callable[[Measured], None]) -> list[str]:
    """Test all that is measured, then measure and write file after file; the names of those that failed.

    `resume` keeps the files that were measured with the sources as they are now. Sources that change meanwhile end it.
    """
    tested = record.sources()
    wanted = [name for name in FILES if not (resume and _measured_with(tested, folder / f"{name}.json"))]
    if not wanted:
        return []
    tell("testing the ops that are measured")
    passed = record.check(sorted({subject for of in SUBJECTS.values() for subject in of}))
    failed = []
    for name in wanted:
        began, file = time.monotonic(), folder / f"{name}.json"
        measured = _process(FILES[name])
        if record.sources() != tested:
            raise ValueError("the sources have changed since their tests passed; start again, with --resume")
        if measured is None:
            failed.append(name)
            continue
        command = shlex.join(["residua", "bench", *FILES[name], "--out", str(file)])
        record.write(file, measured, command=command, passed={one: passed[one] for one in subjects(measured)})
        show(measured)
        tell(f"written: {file}, after {(time.monotonic() - began) / 60:.1f} minutes")
    return failed


def compile(tell: Callable[[str], None]) -> list[str]:
    """Compile all that would be timed, on all cores and any machine, busy or not; the names of what failed."""
    compiling = {name: given for name, given in FILES.items() if given[0] in COMPILING}
    for name in compiling:
        tell(f"compiling what {name} measures")
    return [name for name, given in compiling.items() if _residua(*given, "--compile-only").returncode]


def _measured_with(sources: str, file: Path) -> bool:
    return file.is_file() and record.read(file)["regime"].get("sources") == sources


def _process(arguments: Sequence[str]) -> Measured | None:
    """What `residua bench` measures, its progress on our stderr; None where it fails, which it has said."""
    ran = _residua(*arguments, "--json")
    if ran.returncode:
        return None
    begins = re.search(r"^\{", ran.stdout, re.MULTILINE)  # after whatever a library had to say
    return json.JSONDecoder().raw_decode(ran.stdout[begins.start() :])[0] if begins else None


def _residua(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from residua.cli import main; main()", "bench", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
