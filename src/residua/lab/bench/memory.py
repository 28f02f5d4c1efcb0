"""Peak memory of a training step over that of `standard`: resident high-water above model and inputs, by process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from residua.lab.bench.regime import RETURN_PAGES, environment
from residua.lab.bench.timing import STANDARD, Measured, exponent

SHALLOW = 4
"""Blocks of the first model: enough for a design that groups sublayers."""


LENGTHS = (128, 1024)
"""Tokens: of few, the weights' gradients are most of a step's memory, and reads are made one by one; of many, the
activations are, and reads share passes."""


def measure(designs: Sequence[str], depths: Sequence[int], *, width: int, lengths: Sequence[int]) -> Measured:
    """Each design at each depth in a process of its own, whose allocator returns what is freed."""
    found = {str(tokens): _of_length(designs, depths, width, tokens) for tokens in lengths}
    return {"width": width, "depths": list(depths), "lengths": found}


def _of_length(designs: Sequence[str], depths: Sequence[int], width: int, tokens: int) -> Measured:
    names = dict.fromkeys((STANDARD, *designs))
    peaks = {name: [_in_process(name, depth, width, tokens) for depth in depths] for name in names}
    return {
        "bytes": peaks,
        "ratios": {
            name: [mine / base for mine, base in zip(found, peaks[STANDARD], strict=True)]
            for name, found in peaks.items()
            if name != STANDARD
        },
        "growth": {name: exponent(depths, found) for name, found in peaks.items()} if len(depths) > 1 else {},
    }


def _in_process(design: str, depth: int, width: int, tokens: int) -> int:
    code = "import sys; from residua.lab.bench.memory import main; main(*sys.argv[1:])"
    arguments = [design, str(depth), str(width), str(tokens)]
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(RETURN_PAGES, 1), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"measuring {design} at depth {depth} failed: {ran.stderr.strip().splitlines()[-1]}")
    return int(json.loads(ran.stdout)["peak"])


def main(design: str, depth: str, width: str, tokens: str) -> None:
    """The measuring process: one step of a shallow model to load all code, then the step, its high-water printed."""
    import torch

    from residua.lab.bench.model import step

    torch.set_num_threads(1)
    step(design, min(int(depth), SHALLOW), int(width), 1, int(tokens))()
    run = step(design, int(depth), int(width), 1, int(tokens))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident now
    before = _status("VmRSS")
    run()
    print(json.dumps({"peak": _status("VmHWM") - before}))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory is measured on Linux only")
