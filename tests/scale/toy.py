"""`residua train` on the toy corpus, for tests that kill its processes: toy.py OUT PARALLEL CHANGES [FAULT].

PARALLEL: several, with spaces between, run one after the other, each in the folder of its name below OUT.
FAULT `fail`: rank 1 fails in its fourth update. `nap`: every update takes a little longer, so that a kill can aim.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from residua.lab.train import train
from residua.lab.train.loop import Trainer
from residua.lab.train.ranks import one_voice
from tests.train.harness import toy_config, toy_tokens

out, parallel, changes, fault = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
update = Trainer.update


def slowly(self: Trainer) -> dict[str, Any]:
    if fault == "fail" and self.step == 3 and os.environ["RANK"] == "1":
        raise RuntimeError("the disk of this rank is gone")
    time.sleep(0.05 if fault == "nap" else 0.0)
    return update(self)


Trainer.update = slowly  # type: ignore[method-assign]
with one_voice():
    pids = Path(f"{out}.pids")
    pids.mkdir(exist_ok=True)
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    several = parallel.split()
    for each in several:
        folder = Path(out) / each if len(several) > 1 else Path(out)
        train(toy_config(**changes), folder, tokens=toy_tokens(), parallel=each)
