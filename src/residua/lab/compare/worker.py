"""One run of a comparison, in a process of its own: train or fine-tune, then look at the routing. `python -m` runs it.

A process per run keeps peak memory honest, fixes the threads, and lets one run fail alone. How it ended lies beside its
config when it has ended; a process that ends and leaves no such file was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from residua.lab.common.files import Record, Values, read_json, write_json
from residua.lab.common.hardware import hardware
from residua.lab.common.locks import RunLocked
from residua.lab.compare.work import DONE, FAILED, STOPPED, Work
from residua.lab.finetune_config import FinetuneConfig
from residua.lab.runs import DIVERGED, HARDWARE, ROUTING, read_if_there, read_recipe
from residua.lab.train import Diverged, Interrupted, TrainConfig, load_model, read_metrics, train
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import device_of

PATIENCE = 60.0
"""Seconds that a run which an ended command left has to save, before its folder counts as taken."""
LOOKED_AT = 8
"""Validation sequences that the routing is averaged over."""


def main() -> None:
    """`worker CONFIG_JSON RUN_FOLDER`."""
    end_with_parent()
    code, message = attempt(Work(Path(sys.argv[1]), Path(sys.argv[2])), patience=PATIENCE)
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


def end_with_parent() -> None:
    """Save and end when the process that started this one has ended, in whatever way: the other end of standard input
    is its alone, and reads as closed from then on."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="parent").start()


def attempt(work: Work, *, patience: float = 0.0) -> tuple[int, str]:
    """Bring a run to its end and write down how that was: `DONE`, `FAILED` or `STOPPED`, and what there is to say.

    patience: seconds to wait for another process that is at work in the folder, before refusing. A job may outlive the
              command that started it, and the one that is started in its place then goes on from where it ended.
    """
    try:
        ending = DONE, _run(work, time.monotonic() + patience)
    except (Interrupted, KeyboardInterrupt) as stop:
        ending = STOPPED, str(stop) or "stopped before training began"
    except Exception as error:
        if not isinstance(error, ValueError | TypeError | OSError | ArithmeticError | RuntimeError):
            traceback.print_exc()  # not a mistake in the input: the log says where
        ending = FAILED, f"{type(error).__name__}: {error}"
    work.end(*ending)
    return ending


def _run(work: Work, deadline: float) -> str:
    config, folder = read_recipe(read_json(work.job)), work.folder

    def note(event: Record) -> None:
        if event["kind"] in ("start", "resumed"):
            kinds = (read_if_there(folder / HARDWARE) or {"kinds": []})["kinds"]
            here = hardware(device_of(config))
            write_json(folder / HARDWARE, {"kinds": kinds if here in kinds else [*kinds, here]})

    while True:
        try:
            if isinstance(config, FinetuneConfig):
                from residua.lab.finetune import finetune  # needs transformers

                finetune(config, folder, on_event=note)
            else:
                train(config, folder, on_event=note)
            if not (folder / ROUTING).exists():
                write_json(folder / ROUTING, look(config, folder))
            return ""
        except Diverged as broken:
            write_json(folder / DIVERGED, {"step": broken.step, "site": broken.site, "message": str(broken)})
            return str(broken)
        except RunLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def look(config: Recipe, folder: Path) -> Values:
    """The routing of a trained run on the first sequences of the validation set: summary and mean weights.

    Of a fine-tuned checkpoint the summary that its last validation made; a base without a stream has no sites.
    """
    if not isinstance(config, TrainConfig):
        *_, last = (line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "valid")
        return dict(last.get("routing", {"sites": []}))
    import torch

    from residua.lab.data import prepare
    from residua.lab.diagnose import record_routing

    model = load_model(folder)
    valid = prepare(config.corpus, config.tokenizer).valid
    count = min(LOOKED_AT, len(valid) // config.context)
    ids = torch.from_numpy(valid[: count * config.context].astype("int64")).view(count, config.context)
    with torch.no_grad(), record_routing(model) as record:
        model(ids)
    means = {name: weights.mean((0, 2, 3, 4)).tolist() for name, weights in record.weights().items()}
    return record.summary() | {"mean_weights": means}


if __name__ == "__main__":
    main()
