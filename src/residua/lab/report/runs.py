"""run_data(...): where every number comes from: configuration, data, versions, and the commands that make it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from residua.lab.common.files import Record, Values
from residua.lab.runs import FinishedRun, Series, read_if_there, rounded
from residua.lab.train.config import config_fields


def run_data(
    outs: Sequence[Path],
    shown: Sequence[Series],
    *,
    prompt: str | None = None,
    looked: bool = True,
    ablate: bool = False,
) -> Values:
    """The runs one by one, what their configurations share and where they differ, and commands."""
    configs = [each.seeds[0].settings or {} for each in shown]
    manifests = [each.seeds[0].manifest or {} for each in shown]
    keys = [key for key in config_fields() if key != "seed" and any(key in config for config in configs)]
    shared = {key: configs[0].get(key) for key in keys if len({str(config.get(key)) for config in configs}) == 1}
    return {
        "list": [_row(place, seed) for place, each in enumerate(shown) for seed in each.seeds],
        "shared": {key: _text(value) for key, value in shared.items()},
        "differing": {key: [_text(config.get(key)) for config in configs] for key in keys if key not in shared},
        "data": _facts([manifest.get("data", {}) for manifest in manifests], ("source", "licence", "fingerprint")),
        "versions": _facts([manifest.get("versions", {}) for manifest in manifests]),
        "machine": _facts(manifests, ("machine", "device", "instructions", "threads", "backend")),
        "commands": [
            *_commands(outs[0], shown, configs),
            _own_command(
                outs,
                [
                    *(["--prompt", prompt] if prompt is not None else []),
                    *([] if looked else ["--no-checkpoints"]),
                    *(["--ablate"] if ablate else []),
                ],
            ),
        ],
    }


def _row(place: int, run: FinishedRun) -> Values:
    result = run.result
    return {
        "series": place,
        "seed": run.seed,
        "loss": rounded(result["loss"]),
        "bits_per_byte": rounded(result["bits_per_byte"]),
        "cpu_seconds": rounded(run.seconds),
        "peak_memory": run.memory,
        **{key: result[key] for key in ("tokens", "config", "fingerprint", "checkpoint")},
    }


def _commands(out: Path, shown: Sequence[Series], configs: Sequence[Record]) -> list[dict[str, str]]:
    found = []
    results = read_if_there(out / "results.json") or {}
    if results.get("command"):
        found.append({"what": "all of it", "command": results["command"]})
    for series, config in zip(shown, configs, strict=True):
        if config:
            name = f"runs/{series.slug}-seed{config['seed']}"
            found.append({"what": f"{series.label}, one seed", "command": train_command(config, name)})
    return found


def _own_command(outs: Sequence[Path], flags: Sequence[str]) -> dict[str, str]:
    """What writes the page again, typed where its directories are: a page names no path of the machine it is from."""
    if len(outs) == 1:
        return {
            "what": "this page, in the directory of its runs",
            "command": shlex.join(["residua", "report", ".", *flags]),
        }
    found = [out.resolve() for out in outs]
    above = Path(os.path.commonpath([out.parent for out in found]))
    names = [str(out.relative_to(above)) for out in found]
    command = shlex.join(["residua", "report", *names, "-o", "report.html", *flags])
    return {"what": "this page, in the directory that holds its runs", "command": command}


def train_command(config: Record, out: str) -> str:
    """`residua train` with the flags that are not at their default."""
    parts = ["residua", "train"]
    for name, field in config_fields().items():
        value = config.get(name, field.default)
        if value == field.default:
            continue
        flag = name.replace("_", "-")
        if field.kind is bool:
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            parts += [f"--{flag}", str(value)]
    return shlex.join([*parts, "--out", out])


def _facts(found: Sequence[Record], keys: Sequence[str] | None = None) -> dict[str, str]:
    """What the manifests say of each key; several answers side by side."""
    chosen = keys if keys is not None else list(dict.fromkeys(key for each in found for key in each))
    answers = {key: list(dict.fromkeys(str(each[key]) for each in found if key in each)) for key in chosen}
    return {key: ", ".join(values) for key, values in answers.items() if values}


def _text(value: object) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
