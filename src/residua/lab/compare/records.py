"""A record: what a finished run leaves, without its weights, in one JSON file of a few kilobytes.

    DIR/<config digest>-<data fingerprint>-<numerics>.json    of every run, finished or diverged
    DIR/data/<key>.json                                        the manifest of every corpus, by a hash of its sources
    DIR/pace/<digest of the rows>.json                         what an update of every row takes, where that was timed

A record stands for the run of the same config on the same data by the same arithmetic (`NUMERICS`), wherever it was
made, and for no other: with records, an experiment is made in pieces and on several machines, and its tables are made
again from its files alone. Each file holds the SHA-256 of the rest of it, so that one with a digit changed is refused.

What was timed stands for the rows of a plan, whatever their rates, seeds and text.

What is left out of a run: weights, the lines of single updates (`lab.updates` says what they come to), and of the
routing what no table, figure or page reads. With records, the run's own folder keeps the routing of the record, so that
everything is drawn from the same numbers the first time and ever after.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from residua.lab.common.files import Record, Values, json_digest, read_json, replace_file, write_json
from residua.lab.compare.pace import PACE, digest_of_rows
from residua.lab.compare.plan import ComparePlan, Run
from residua.lab.data.identity import data_key
from residua.lab.diagnose.condensed import condensed
from residua.lab.runs import DIVERGED, HARDWARE, RESULT, ROUTING, UPDATES, divergence, has_ended, read_if_there
from residua.lab.train import TrainConfig, read_metrics
from residua.lab.train.numerics import NUMERICS
from residua.lab.updates import summarise

FORMAT = 1
DATA, PACES = "data", "pace"


class Records:
    """The records in a directory, for runs on one corpus."""

    def __init__(self, root: Path | str, corpus: str, tokenizer: str, prepare: Callable[[], Record]) -> None:
        """prepare: makes the tokens, and gives their manifest; called if nobody has written it down here."""
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"--records {root} is a file; give a directory")
        self._corpus, self._tokenizer, self._prepare = corpus, tokenizer, prepare
        self._known: Record | None = None

    @property
    def data(self) -> Record:
        """The manifest of the corpus: from `data/`, if the sources there are those of this machine, or made now."""
        if self._known is None:
            key = data_key(self._corpus, self._tokenizer)
            path = self.root / DATA / f"{key[:32]}.json" if key else None
            if path is not None and path.exists():
                self._known = _checked(path)["manifest"]
            else:
                self._known = self._prepare()
                if path is not None:
                    _write(path, {"manifest": dict(self._known)})
        return self._known

    def path(self, config: TrainConfig) -> Path:
        """Where the record of a run is."""
        return self.root / f"{config.digest}-{self.data['fingerprint'][:16]}-{NUMERICS}.json"

    def take(self, run: Run, out: Path) -> bool:
        """Put the record of a run in its folder below `out`; whether there is one. One that was changed is refused."""
        path, folder = self.path(run.config), out / run.folder
        if not path.exists():
            return False
        record = _checked(path)
        self._check(path, record, run.config)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", run.config.to_json())
        write_json(folder / "manifest.json", {"data": dict(self.data), **record["made_with"]})
        write_json(folder / HARDWARE, {"kinds": record["hardware"]})
        write_json(folder / UPDATES, record["updates"])
        lines = "".join(json.dumps(line) + "\n" for line in record["validations"])
        replace_file(folder / "metrics.jsonl", [lines.encode()])
        # what the folder may hold of an end that another machine did not see goes
        if record["diverged"] is not None:
            for stale in (RESULT, ROUTING):
                (folder / stale).unlink(missing_ok=True)
            write_json(folder / DIVERGED, record["diverged"])
        else:
            (folder / DIVERGED).unlink(missing_ok=True)
            write_json(folder / ROUTING, record["routing"])
            write_json(folder / RESULT, record["result"])
        return True

    def settle(self, run: Run, out: Path) -> bool:
        """Bring a run and its record to say the same; whether there is a record now.

        A run that has not ended takes its record. One that has writes it, unless another machine was first: then the
        folder takes that one, for tables are made of records.
        """
        path, folder = self.path(run.config), out / run.folder
        if not has_ended(folder):
            return self.take(run, out)
        record = pack(folder, run.config)
        if path.exists():
            return record["result"] == _checked(path)["result"] or self.take(run, out)
        if record["fingerprint"] != self.data["fingerprint"]:
            raise ValueError(
                f"{folder} was trained on data {record['fingerprint']}, and {self._corpus} is "
                f"{self.data['fingerprint']} now; restore the corpus or choose another --out"
            )
        _write(path, record)
        if record["routing"] is not None:
            write_json(folder / ROUTING, record["routing"])
        return True

    def settle_pace(self, plan: ComparePlan, out: Path, *, anew: bool) -> None:
        """Bring what was timed of a plan's rows in `out` and here to be the same: the one that is here, if there is one
        and none was made `anew`."""
        path, own = self.root / PACES / f"{digest_of_rows(plan)}.json", out / PACE
        if path.exists() and not anew:
            write_json(own, _checked(path))
        elif own.exists():
            _write(path, read_json(own))

    def _check(self, path: Path, record: Record, config: TrainConfig) -> None:
        """The record is of the run that its name says."""
        own = TrainConfig.from_json(record["config"]).digest
        if (own, record["fingerprint"], record["numerics"]) != (config.digest, self.data["fingerprint"], NUMERICS):
            raise ValueError(
                f"{path} holds another run than its name says (config {own}, data {record['fingerprint'][:16]}, "
                f"numerics {record['numerics']}); delete it, and the run is made again"
            )


def pack(folder: Path, config: TrainConfig) -> Values:
    """The record of a run that has ended, from its folder."""
    lines: dict[str, list[Record]] = {"train": [], "valid": []}
    if (folder / "metrics.jsonl").exists():
        for line in read_metrics(folder / "metrics.jsonl"):
            lines[line["kind"]].append(line)
    manifest = dict(read_json(folder / "manifest.json"))
    data = manifest.pop("data")
    broken, routing = divergence(folder), read_if_there(folder / ROUTING)
    return {
        "format": FORMAT,
        "numerics": NUMERICS,
        "fingerprint": data["fingerprint"],
        "config": config.to_json(),
        "result": None if broken else read_json(folder / RESULT),
        "diverged": None if broken is None else dict(broken),
        "validations": lines["valid"],
        "updates": read_if_there(folder / UPDATES) or summarise(lines["train"]),
        "routing": None if broken or routing is None else condensed(routing),
        "hardware": list((read_if_there(folder / HARDWARE) or {"kinds": ()})["kinds"]),
        "made_with": manifest,
    }


def _write(path: Path, values: Values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"digest": json_digest(values), **values}, separators=(",", ":"))
    replace_file(path, [text.encode() + b"\n"], path.with_name(f".{path.name}.{uuid4().hex}"))


def _checked(path: Path) -> Values:
    """The values of a file of records; an error that names it if they are not those that were written."""
    values = read_json(path)
    said = values.pop("digest", None)
    if said != json_digest(values):
        raise ValueError(
            f"{path} was changed after it was written: what it holds does not have the digest {str(said)[:16]}...; "
            "restore it, or delete it and it is made again"
        )
    if values.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path} has format {values['format']}, and this version reads {FORMAT}; delete it")
    return values
