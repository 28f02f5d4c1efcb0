"""The state of a run on disk: a folder that is whole or is not there.

    checkpoints/step-00000100/
        model.safetensors, optimizer.safetensors, rng.safetensors     all tensors, nothing that is run on loading
        state.json                                                    format, step, SHA-256 of each file, config, ...

A folder is written under another name, every file and the folder are synced, and then it is renamed: the last good
checkpoint stays until the new one is whole. Loading checks every checksum; `newest` names a damaged checkpoint and
takes the one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from residua.lab.common.files import (
    DiskFull,
    Record,
    Values,
    differing,
    file_digest,
    json_digest,
    read_json,
    room_for,
    safetensors_header,
    sync_folder,
    write_file,
)

FORMAT = 1
PIECES = 2
"""The format of a checkpoint that several ranks wrote (`residua.lab.train.sharded`): read here, written there."""
PARTS = ("model", "optimizer", "rng")

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class CheckpointError(OSError):
    """A checkpoint that cannot be used: damaged, or of another format."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` updates."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By part, then by name."""
    info: Record
    """Plain values that belong to the state: configuration, seconds spent, the last validation."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder`; it is there when this returns, even if the power fails."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name(checkpoint.step)
    scratch = folder / f".writing-{target.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with room_for(f"checkpoint {target}"):
            scratch.mkdir()
            sums = {
                f"{part}.safetensors": write_file(
                    scratch / f"{part}.safetensors", serialized(checkpoint.tensors[part]), fault=True
                )
                for part in PARTS
            }
            state = {"format": FORMAT, "step": checkpoint.step, "sha256": sums, "info": dict(checkpoint.info)}
            state["seal"] = seal(state)
            write_file(scratch / "state.json", [json.dumps(state, indent=2).encode() + b"\n"], fault=True)
            sync_folder(scratch)
            scratch.rename(target)
            sync_folder(folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, DiskFull):
            whole = steps(folder)
            last = f"{name(whole[-1])} is whole" if whole else "there is none before it"
            raise DiskFull(
                error.errno, f"{error.strerror}; {last}. Free some space and run the same command to continue"
            ) from error
        raise
    return target


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and check it to the last bit; anything wrong is a `CheckpointError` that says what."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = read_state(path)
    check_files(path, state, state["sha256"])
    if state["format"] == PIECES:
        from residua.lab.train.pieces import assembled

        return Checkpoint(state["step"], assembled(path), state["info"])
    tensors = {}
    for part in PARTS:
        file = path / f"{part}.safetensors"
        try:
            tensors[part] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {file.name} cannot be read ({error})") from None
    return Checkpoint(state["step"], tensors, state["info"])


def read_state(path: Path) -> Values:
    """The state.json of a checkpoint, as it was written."""
    try:
        state = read_json(path / "state.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: state.json cannot be read ({error})") from None
    if state.get("format") not in (FORMAT, PIECES):
        raise CheckpointError(
            f"{path}: format {state.get('format')!r}; this version of residua reads {FORMAT} and {PIECES}"
        )
    if state.get("seal") != seal(state):
        raise CheckpointError(f"{path}: state.json was changed after it was written")
    if path.name.startswith("step-") and path.name != name(state["step"]):
        raise CheckpointError(f"{path}: it is the checkpoint of step {state['step']}, in the folder of another")
    return state


def check_belongs(path: Path, info: Record, config: Record) -> None:
    """Refuse a checkpoint that another run wrote: going on from it would make a run that nobody described."""
    if found := differing(info.get("config", {}), config):
        raise ValueError(f"{path} is a checkpoint of another run ({found}); move it away, or give another directory")


def check_files(path: Path, state: Record, names: Iterable[str]) -> None:
    """Refuse a checkpoint of whose files, these ones, a byte is not as it was written."""
    for name in names:
        try:
            intact = file_digest(path / name) == state["sha256"][name]
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from None
        if not intact:
            raise CheckpointError(f"{path}: {name} is damaged (its checksum does not match)")


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix("step-") for path in folder.iterdir() if path.name.startswith("step-"))
    return sorted(int(name) for name in names if name.isdigit())


def newest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint that is whole, and why each of the damaged ones that stood before it is.

    If there are some and none is whole, that is an error: starting over is for the user to decide.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(steps(folder)):
        path = folder / name(step)
        try:
            return load(path), damaged
        except CheckpointError as error:
            damaged[path] = str(error).removeprefix(f"{path}: ")
    if damaged:
        listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise CheckpointError(f"no usable checkpoint in {folder} ({listed}); delete that folder to start over")
    return None, {}


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that new ones can take their place; of each step only the last is kept."""
    for path in damaged:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def tidy(folder: Path, keep: int) -> None:
    """Remove what a killed process left half written or half removed, and all but the newest `keep` checkpoints.

    Of the damaged ones the newest stays, for the curious.
    """
    if not folder.is_dir():
        return
    for step in steps(folder)[:-keep]:
        # first out of sight: a checkpoint must not be seen half removed
        path = folder / name(step)
        path.rename(folder / f".old-{path.name}")
    gone = [path for path in folder.iterdir() if path.name.startswith((".old-", ".writing-"))]
    for path in (*gone, *sorted(folder.glob("damaged-*"))[:-1]):
        shutil.rmtree(path)
    sync_folder(folder)


def serialized(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece: no second copy of the tensors, and the checksum in the same pass."""
    # largest items first, as the format's own writer does: every tensor is then aligned
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    yield safetensors_header({name: (_TYPES[one.dtype], one.shape, one.nbytes) for name, one in ordered})
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def name(step: int) -> str:
    """What the folder of a step is called."""
    return f"step-{step:08d}"


def seal(state: Record) -> str:
    """The checksum of everything in state.json but itself."""
    return json_digest({key: value for key, value in state.items() if key != "seal"})
