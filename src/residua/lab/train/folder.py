"""A run directory: what is in it, and whose it is.

config.json     the recipe, with the model; a directory belongs to the config it was made with
manifest.json   corpus, versions, machine; the layouts of ranks that worked here, if there were several processes
tokenizer.json  what turns text into its ids and back, so that `generate` needs neither the corpus nor a cache
metrics.jsonl   one line per update and validation
checkpoints/    the newest states
result.json     written last: a directory that has it is finished
run.lock        held while a process works here
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from residua.lab.common import locks
from residua.lab.common.expect import read_expected
from residua.lab.common.files import (
    Record,
    Values,
    contents,
    differing,
    read_json,
    sync_folder,
    versions,
    write_json,
)
from residua.lab.train.metrics import MetricsFile
from residua.lab.train.recipe import Recipe

Resume = Literal["auto", "never", "must"]


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.manifest, self.result = (path / f"{name}.json" for name in ("config", "manifest", "result"))
        self.tokenizer = path / "tokenizer.json"
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = path / "checkpoints"

    def check(self, config: Recipe, resume: Resume) -> None:
        """Refuse a directory that is not this run's, without touching it."""
        if resume not in ("auto", "never", "must"):
            raise ValueError(f"resume is auto, never or must, not {resume!r}")
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path} is a file; choose another directory for the run")
        if not self.config.exists():
            if resume == "must":
                raise FileNotFoundError(f"{self.path} holds no run to resume; drop resume=must to start one")
            # what a process killed in its first moments may leave is ours
            written = [self.manifest.name, self.config.name, self.tokenizer.name]
            ours = {locks.NAME, *written, *(f".{name}.writing" for name in written)}
            foreign = sorted(contents(self.path) - ours)
            if foreign:
                raise FileExistsError(
                    f"{self.path} is not empty and holds no run ({', '.join(foreign[:3])}); choose another directory"
                )
            return
        if resume == "never":
            raise FileExistsError(f"{self.path} holds a run already; choose another directory or resume=auto")
        if found := differing(read_json(self.config), config.to_json()):
            raise FileExistsError(f"{self.path} belongs to another configuration ({found}); choose another directory")

    def start(
        self, config: Recipe, data: Record, device: torch.device, tokenizer: Record | None, ranks: Record | None = None
    ) -> Record | None:
        """Write what identifies the run, or check that the data are still those it began with.

        ranks: how the processes are laid out; None for one. It is no part of the config: the same run goes on with
        another number of ranks, and the layout that it had before is returned, if it is another.
        """
        if self.manifest.exists():
            began = read_expected(self.manifest, {"data": dict})["data"].get("fingerprint")
            if began != data.get("fingerprint"):
                raise ValueError(
                    f"{self.path} was trained on data {began}, but {config.corpus} is {data.get('fingerprint')} now; "
                    "restore the corpus or choose another directory"
                )
        else:
            laid = {} if ranks is None else {"ranks": [dict(ranks)]}
            write_json(self.manifest, {"data": dict(data), **machine(device), **laid})
        if tokenizer is not None and not self.tokenizer.exists():
            write_json(self.tokenizer, tokenizer)
        if not self.config.exists():
            write_json(self.config, config.to_json())
        self.checkpoints.mkdir(exist_ok=True)
        sync_folder(self.path)
        sync_folder(self.path.absolute().parent)
        self._note_execution(device)
        return self._relaid(ranks)

    def _note_execution(self, device: torch.device) -> None:
        """Add what makes the updates from now on to the manifest, unless it is what made them before."""
        manifest = read_json(self.manifest)
        now = execution(machine(device))
        made = manifest.get("execution", [execution(manifest)])
        if made[-1] != now:
            write_json(self.manifest, manifest | {"execution": [*made, now]})

    def made_by(self) -> list[str]:
        """What made the updates: one text, or several of a run that was resumed with other kernels or versions."""
        manifest = read_json(self.manifest)
        return list(dict.fromkeys(manifest.get("execution", [execution(manifest)])))

    def _relaid(self, ranks: Record | None) -> Record | None:
        """The layout of ranks before this one, if it was another; the manifest then lists both."""
        manifest = read_json(self.manifest)
        one = {"processes": 1, "parallel": "dp=1"}
        laid = manifest.get("ranks", [one])
        now = one if ranks is None else dict(ranks)
        if laid[-1] == now:
            return None
        write_json(self.manifest, manifest | {"ranks": [*laid, now]})
        return laid[-1]


def execution(found: Record) -> str:
    """What a `machine` computes with, as one text: the backend, its kernels, instructions, threads and torch."""
    kernels = ", ".join(f"{op} {name}" for op, on in found.get("kernels", {}).items() for name in on.values())
    return (
        f"backend {found.get('backend')} ({kernels or 'no kernels'}; native {found.get('native', 'unknown')}), "
        f"{found.get('device')}, {found.get('instructions')}, {found.get('threads')} threads, "
        f"torch {found.get('versions', {}).get('torch')}"
    )


def machine(device: torch.device) -> Values:
    """Versions and hardware: what a result depends on beside the config and the data."""
    from residua.native import library
    from residua.ops import _backend

    return {
        "versions": {**versions(), "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "backend": _backend.choice(),
        "kernels": _backend.kernels(),
        "native": library.identity() or "none",
    }
