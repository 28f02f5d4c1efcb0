"""A corpus of a few thousand tokens that can be learned in a few steps, runs of a second, and how to compare runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from residua.lab.train import Result, TrainConfig, read_metrics, train

VOCAB = 24


@dataclass(frozen=True)
class ToyTokens:
    """What `residua.lab.data.prepare` gives, in the fields that training uses."""

    train: np.ndarray
    valid: np.ndarray
    vocab: int = VOCAB
    mask: int | None = VOCAB - 1
    valid_bytes: int = 900
    manifest: Mapping[str, Any] = field(default_factory=lambda: {"fingerprint": "toy"})


def toy_tokens(size: int = 3000, *, valid: int = 600) -> ToyTokens:
    """Each token follows from the one before, but for one in eight that is drawn."""
    draw = np.random.default_rng(5)
    ids = np.zeros(size + valid, dtype=np.uint16)
    noise, drawn = draw.random(len(ids)) < 0.125, draw.integers(0, VOCAB - 1, len(ids))
    for i in range(1, len(ids)):
        ids[i] = drawn[i] if noise[i] else (5 * ids[i - 1] + 3) % (VOCAB - 1)
    return ToyTokens(ids[:size], ids[size:])


def toy_config(**changes: Any) -> TrainConfig:
    """Twelve updates of a model of two blocks, saved every four."""
    settings: dict[str, Any] = {
        "design": "delta", "width": 16, "depth": 2, "heads": 2, "mlp_width": 24, "steps": 12, "batch": 4, "context": 12,
        "lr": 1e-2, "eval_every": 4, "eval_windows": 8, "save_every": 4, "seed": 3,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


class Stop(Exception):
    """Ends a run from inside, as a crash would: nothing more is written."""


def stop_after(kind: str, step: int) -> Callable[[Mapping[str, Any]], None]:
    """A listener that crashes the run at an event."""

    def listen(event: Mapping[str, Any]) -> None:
        if event["kind"] == kind and event["step"] == step:
            raise Stop(f"{kind} at {step}")

    return listen


def run(out: Path, config: TrainConfig | None = None, **options: Any) -> Result:
    """Train on the toy corpus."""
    return train(config or toy_config(), out, **({"tokens": toy_tokens()} | options))


def untimed(value: Any) -> Any:
    """A line or a result without what depends on the clock."""
    return {key: inner for key, inner in value.items() if key != "time"}


def metrics(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run without their `time`."""
    return [untimed(line) for line in read_metrics(out / "metrics.jsonl") if kind in (None, line["kind"])]


def final_files(out: Path) -> dict[str, str]:
    """The digest of every tensor file in the last checkpoint: weights, optimizer and random states."""
    last = max((out / "checkpoints").glob("step-*"))
    return {
        f"{last.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(last.glob("*.safetensors"))
    }


def outcome(out: Path) -> dict[str, Any]:
    """All that must not depend on how often a run was killed."""
    from residua.lab.common.files import read_json

    return {
        "files": final_files(out),
        "metrics": metrics(out),
        "result": untimed(read_json(out / "result.json")),
        "checkpoints": sorted(path.name for path in (out / "checkpoints").iterdir()),
    }


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and what is in it."""

    def each() -> Iterator[tuple[str, bytes]]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(folder)), path.read_bytes()

    return dict(each())
