"""Runs of `train` on two processes, one after the other: see `test_train.py`. Every rank leaves what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from residua.lab.train import sharded, train
from residua.lab.train.config import TrainConfig
from residua.lab.train.ranks import joined
from residua.scale.layout import Parallel, Pipes
from tests.scale.common import BROKEN, DEEP, DOUBLE, RUNS, in_float64
from tests.train.harness import ToyTokens, toy_config, toy_tokens

OUT = Path(sys.argv[1]).parent
RANK = int(os.environ["RANK"])
seen: dict[str, Any] = {}


class Trap(ToyTokens):
    """Tokens at which something happens when an update looks at them for the n-th time, on rank 1 alone."""

    left: ClassVar[list[int]] = []
    happen: ClassVar[Any] = None

    def __getattribute__(self, name: str) -> Any:
        if name == "train" and RANK == 1 and Trap.left:
            Trap.left[0] -= 1
            if Trap.left[0] == 0:
                Trap.happen()
        return super().__getattribute__(name)


def trapped(after: int, happen: Any) -> ToyTokens:
    tokens = toy_tokens()
    made = Trap(tokens.train, tokens.valid)
    Trap.left, Trap.happen = [after], happen
    return made


def attempt(label: str, config: TrainConfig, parallel: str, **options: Any) -> None:
    """One run: its result or error and its events, as this rank has them."""
    events: list[Any] = []
    listen = options.pop("on_event", lambda event: None)

    def take(event: Mapping[str, Any]) -> None:
        events.append({key: value for key, value in event.items() if key != "time"})
        listen(event)

    begun = time.monotonic()
    out = OUT / options.pop("out", label)
    try:
        options.setdefault("tokens", toy_tokens())
        found: Any = train(config, out, parallel=parallel, on_event=take, **options).to_json()
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    seen[label] = {"result": found, "events": events, "seconds": time.monotonic() - begun}


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """What is compiled is traced and differentiated by torch.compile, and then run without a compiler of C++."""
    before = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, *args, **kwargs: before(self, *args, backend="aot_eager")  # type: ignore
    try:
        yield
    finally:
        torch.nn.Module.compile = before  # type: ignore[method-assign]
        frames = torch._dynamo.utils.counters["frames"]
        seen["frames"] = {key: int(count) for key, count in frames.items()}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def signal_at(kind: str, step: int) -> Any:
    """A listener, heard on rank 0, that asks the run to stop."""
    return lambda event: interrupt() if (event["kind"], event["step"]) == (kind, step) else None


def damage(folder: Path, step: int) -> None:
    if RANK == 0:
        file = max((folder / "checkpoints" / f"step-{step:08d}").glob("shard-00002*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def blocking() -> dict[str, float]:
    """Seconds that a step waits for a save, and for one that goes on beside it."""
    from residua.lab.train.loop import Trainer

    with joined(lambda size: (Parallel(fsdp=size), ""), torch.device("cpu")) as ranks:
        trainer = Trainer(toy_config(width=256, depth=4, mlp_width=512), toy_tokens(), None, ranks)
        trainer.update()
        saver = sharded.Saver(OUT / "beside", ranks, 2)
        found: dict[str, list[float]] = {"waits": [], "beside": []}
        for step in range(1, 4):
            ranks.say([0])
            begun = time.perf_counter()
            saver.begin(trainer.checkpoint())
            found["beside"].append(time.perf_counter() - begun)
            saver.finished(wait=True)
            found["waits"].append(time.perf_counter() - begun)
            trainer.step = 10 + step
        saver.close()
    return {key: min(each) for key, each in found.items()}


for name, changes in RUNS.items():
    for parallel in ("dp=2", "fsdp=2", "tp=2", "pp=2"):
        attempt(f"{name} {parallel}", toy_config(**changes), parallel)
with in_float64():
    for name, (parallel, pipes) in DOUBLE.items():
        attempt(f"double {name}", toy_config(**DEEP), parallel, pipes=pipes)
config = toy_config()
attempt("moved", config, "dp=2", on_event=signal_at("saved", 4))
attempt("moved again", config, "fsdp=2", out="moved", on_event=signal_at("train", 8))
attempt("moved on", config, "tp=2", out="moved")
attempt("handed over", config, "pp=2", on_event=signal_at("train", 8))  # one process began it
attempt("handed over on", config, "fsdp=2", out="handed over")
attempt("damaged", config, "fsdp=2", on_event=signal_at("train", 10))
damage(OUT / "damaged", 11)
attempt("repaired", config, "fsdp=2", out="damaged")
attempt("signalled", config, "fsdp=2", tokens=trapped(8, interrupt))
attempt("signalled on", config, "fsdp=2", out="signalled")
attempt("signalled stages", config, "pp=2", tokens=trapped(8, interrupt))
attempt("signalled stages on", config, "pp=2", out="signalled stages")
for parallel in ("fsdp=2", "pp=2"):
    for label, changes in BROKEN.items():
        attempt(f"{label} {parallel}", toy_config(**changes), parallel)
attempt("mismatched", toy_config(seed=RANK), "dp=2")
attempt("wrong", config, "dp=3,tp=5,fsdp=2")
attempt("few rows", config, "pp=2", pipes=Pipes(microbatches=3))
attempt("no stages", config, "dp=2", pipes=Pipes(schedule="gpipe"))
attempt("offload of copies", config, "dp=2", offload=True)
attempt("offload", toy_config(steps=4), "fsdp=2", offload=True)
with compiled_quickly():
    attempt("compiled", toy_config(steps=4, compile=True), "fsdp=2")
attempt("compiled stages", toy_config(compile=True), "pp=2")
attempt("not said", config, None)  # type: ignore[arg-type]
attempt("auto", toy_config(steps=4), "auto")
seen["blocking"] = blocking()
Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(seen))
if RANK == 0:
    Path(sys.argv[1]).write_text("{}")
