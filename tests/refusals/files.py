"""Refusals of files: what is done to a copy of a finished run or to a plan, the command, and words of the line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

Harm = Callable[[Path], None]
STEP = "checkpoints/step-00000002"


def written(name: str, text: str) -> Harm:
    """A file of the run holds another text."""
    return lambda run: (run / name).write_text(text) and None


def changed(name: str, **values: object) -> Harm:
    """Fields of a JSON file are others; None takes one out."""

    def harm(run: Path) -> None:
        found = json.loads((run / name).read_text()) | values
        (run / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return harm


def gone(name: str) -> Harm:
    """A file of the run is not there."""
    return lambda run: (run / name).unlink()


def both(first: Harm, second: Harm) -> Harm:
    """One after the other."""

    def harm(run: Path) -> None:
        first(run)
        second(run)

    return harm


def renamed(run: Path) -> None:
    """The checkpoint lies in the folder of another step."""
    (run / "result.json").unlink()
    (run / STEP).rename(run / "checkpoints/step-00000001")


def foreign_seed(run: Path) -> None:
    """The checkpoint of the same run with another seed was copied in: sealed, whole, and not its own."""
    from residua.lab.train import checkpoint as checkpoints

    state = json.loads((run / STEP / "state.json").read_text())
    state["info"]["config"]["seed"] = 7
    state["seal"] = checkpoints.seal(state)
    (run / STEP / "state.json").write_text(json.dumps(state))
    (run / "result.json").unlink()


def kept(harm: Harm) -> Harm:
    """The same, of a run that has its result."""

    def harmed(run: Path) -> None:
        result = (run / "result.json").read_text()
        harm(run)
        (run / "result.json").write_text(result)

    return harmed


def linked(run: Path) -> None:
    """The lock is a symbolic link to a file of somebody."""
    (run / "result.json").unlink()
    (run / "run.lock").unlink(missing_ok=True)
    (run.parent / "precious.txt").write_text("precious")
    (run / "run.lock").symlink_to(run.parent / "precious.txt")


def unfinished(run: Path) -> None:
    """No result and no checkpoint, but the config."""
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints")


AGAIN = "train --config {run}/config.json --out {run}"
RUNS: list[tuple[str, Harm, str, str]] = [
    ("result {}", written("result.json", "{}"), AGAIN, "has no design"),
    ("result []", written("result.json", "[]"), AGAIN, "does not hold a JSON object"),
    ("result cut", written("result.json", '{"loss": '), AGAIN, "is not JSON"),
    ("result of another config", changed("result.json", config="0" * 16), AGAIN, "result of another configuration"),
    ("result with a word for a loss", changed("result.json", loss="low"), AGAIN, 'loss is "low", not a number'),
    ("result with a strange field", changed("result.json", banana=1), AGAIN, "has banana"),
    ("result without its time", changed("result.json", time=None), AGAIN, "has no time"),
    ("config of another seed", changed("config.json", seed=3), "train --config {run}/config.json --seed 0 --out {run}",
     "seed is 3 there and 0 here"),
    ("config {}", written("config.json", "{}"), "train --corpus dir:corpus --out {run}", "another configuration"),
    ("config []", written("config.json", "[]"), "train --corpus dir:corpus --out {run}", "does not hold a JSON object"),
    ("checkpoint of another step", renamed, AGAIN, "it is the checkpoint of step 2"),
    ("checkpoint of another seed", foreign_seed, AGAIN, "seed is 7 there and 0 here"),
    ("manifest {}", both(gone("result.json"), written("manifest.json", "{}")), AGAIN, "has no data"),
    ("manifest of other data", both(gone("result.json"), changed("manifest.json", data={"fingerprint": "x"})), AGAIN,
     "was trained on data x"),
    ("lock is a link", linked, AGAIN, "is a symbolic link"),
    ("report of result {}", written("result.json", "{}"), "report {run}", "has no loss"),
    ("report of result null", written("result.json", "null"), "report {run}", "does not hold a JSON object"),
    ("report of a result of another config", changed("result.json", config="0" * 16), "report {run}",
     "result of another configuration"),
    ("report of metrics []", written("metrics.jsonl", "[]\n"), "report {run}", "line 1: it is [], not an object"),
    ("report of metrics {}", written("metrics.jsonl", "{}\n"), "report {run}", "line 1 has no kind"),
    ("report of odd metrics", written("metrics.jsonl", '{"kind": "x"}\n'), "report {run}", "neither train nor valid"),
    ("report of metrics without loss", written("metrics.jsonl", '{"kind": "valid"}\n'), "report {run}", "has no loss"),
    ("report of no validation", written("metrics.jsonl", ""), "report {run}", "holds no validation"),
    ("report of broken metrics", written("metrics.jsonl", "{\n"), "report {run}", "line 1 is not JSON"),
    ("report of routing {}", written("routing.json", "{}"), "report {run}", "has no network"),
    ("report of routing 3", written("routing.json", "3"), "report {run}", "does not hold a JSON object"),
    ("report of hardware {}", written("hardware.json", "{}"), "report {run}", "has no kinds"),
    ("report of manifest []", written("manifest.json", "[]"), "report {run}", "does not hold a JSON object"),
    ("report of config {}", written("config.json", "{}"), "report {run}", "result of another configuration"),
    ("report of an unfinished run", unfinished, "report {run}", "holds no finished run"),
    ("generate without a tokenizer", gone("tokenizer.json"), "generate {run} -p x", "has no tokenizer.json"),
    ("generate with tokenizer {}", written("tokenizer.json", "{}"), "generate {run} -p x", "has no name"),
    ("generate with tokenizer []", written("tokenizer.json", "[]"), "generate {run} -p x", "not an object"),
    ("generate with half a tokenizer", written("tokenizer.json", "{"), "generate {run} -p x", "is not JSON"),
    ("generate with a name alone", written("tokenizer.json", '{"name": "bpe:300"}'), "generate {run} -p x",
     "has no tokenizer"),
    ("generate with an empty tokenizer",
     written("tokenizer.json", '{"name": "x", "end": 0, "mask": 1, "tokenizer": {}}'), "generate {run} -p x",
     "cannot be read"),
    ("generate from another's checkpoint", kept(foreign_seed), "generate {run} -p x", "is a checkpoint of another run"),
    ("generate from no checkpoint", unfinished, "generate {run} -p x", "holds a run without a checkpoint"),
    ("generate from half a checkpoint", written(f"{STEP}/model.safetensors", "x"), "generate {run} -p x",
     "no usable checkpoint"),
    ("generate from a changed state", changed(f"{STEP}/state.json", step=1), "generate {run} -p x",
     "changed after it was written"),
    ("checkpoint list of state {}", written(f"{STEP}/state.json", "{}"), "checkpoint {run}", "format None"),
    ("duality of another's checkpoint", kept(foreign_seed), "duality --run {run}", "checkpoint of another run"),
    ("eval of tokenizer {}", written("tokenizer.json", "{}"), "eval {run} --corpus dir:corpus", "has no name"),
]  # fmt: skip

PLANS: list[tuple[str, str]] = [
    ("", "a plan needs designs"),
    ("designs = []", "at least one of designs"),
    ("designs = [1]", "designs are texts, not 1"),
    ("designs = 'standard'", "designs is a list"),
    ("designs = [['standard']]", "designs are texts"),
    ("designs = [{ name = 'standard' }]", "designs are texts"),
    ("designs = ['standard']\nbanana = 1", "a plan has no 'banana'"),
    ("designs = ['standard']\nlayouts = [1]", "layouts are texts, not 1"),
    ("designs = ['standard']\nlayouts = []", "at least one of layouts"),
    ("designs = ['standard']\nsizes = [1]", "sizes takes tables"),
    ("designs = ['standard']\nsizes = [{ depth = 0 }]", "depth is a whole number from 1 on"),
    ("designs = ['standard']\nsizes = [{ depth = '6' }]", "depth is a whole number"),
    ("designs = ['standard']\nsizes = [{ banana = 6 }]", "sizes has no 'banana'"),
    ("designs = ['standard']\nseeds = 3", "seeds is a list"),
    ("designs = ['standard']\nseeds = [0, 0]", "seeds names one twice"),
    ("designs = ['standard']\nseeds = ['a']", "whole numbers from 0 on"),
    ("designs = ['standard']\nseeds = [-1]", "whole numbers from 0 on"),
    ("designs = ['standard']\nseeds = [[1]]", "whole numbers from 0 on"),
    ("designs = ['standard']\nthreads = 'two'", "threads must be at least 1"),
    ("designs = ['standard']\nmatch = 3", "match is none, params, flops"),
    ("designs = ['standard']\nbaseline = 3", "baseline is a design"),
    ("designs = ['standard']\nalso = [1]", "also takes rows"),
    ("designs = ['standard']\nalso = [{ design = 'standard' }]", "also takes rows"),
    ("designs = ['standard']\nalso = ['standard']", "also takes rows"),
    ("designs = ['standard']\ntrain = 3", "[train] is a table"),
    ("designs = ['standard']\n[train]\nbanana = 1", "[train] has no 'banana'"),
    ("designs = ['standard']\n[train]\nsteps = '5'", "steps takes whole number"),
    ("designs = ['standard']\n[train]\nsteps = [5]", "steps takes whole number"),
    ("designs = ['standard']\n[train]\nwidth = 5", "must not set width"),
    ("designs = ['standard']\n[train]\neps = nan", "eps must be finite"),
    ("designs = ['standard']\ntune = 3", "tune takes tables"),
    ("designs = ['standard']\n[tune]\nbanana = [1]", "tune has no 'banana'"),
    ("designs = ['standard']\n[tune]\nlr = 1e-3", "tune.lr is a list"),
    ("designs = ['standard']\n[tune]\nlr = ['a']", "tune.lr are positive numbers"),
    ("designs = ['standard']\n[tune]\nlr = [inf]", "tune.lr are positive numbers, not inf"),
    ("designs = ['standard']\n[tune]\nlr = [nan]", "tune.lr are positive numbers, not nan"),
    ("designs = ['standard']\n[tune]\nlr = [1e-3]\nseeds = []", "at least one of tune.seeds"),
    ("designs = ['standard']\n[tune]\nlr = [1e-3]\nseeds = [5, 5]", "tune.seeds names one twice"),
    ("designs = ['standard']\n[tune]\nlr = [1e-3]\nseeds = [0]", "used for tuning and for reporting"),
    ("designs = ['standard']\n[tune]\nlr = [1e-3, 1.00000001e-3]", "share the folder"),
]
