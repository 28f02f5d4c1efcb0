"""The state of a run that lies on several ranks: every rank writes its pieces, and any number of ranks reads them.

    checkpoints/step-00000100/
        shard-00001-...safetensors, shard-00002-...   the pieces of each rank; their places are in the headers
        rng.safetensors                               random states, of rank 0
        state.json                                    format 2, step, SHA-256 of each file, configuration, ...

`torch.distributed.checkpoint` plans who writes and reads what, over its safetensors storage: nothing is pickled. The
folder is written under another name and renamed when rank 0 has sealed it, as that of one process is. A checkpoint of
one process (format 1) has the same names inside, and loads into pieces as well.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from residua.lab.common.files import Record, Values, file_digest, room_for, sync_folder, write_file
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.checkpoint import Checkpoint, CheckpointError
from residua.lab.train.pieces import RNG, read_into, stored
from residua.lab.train.placement import local
from residua.lab.train.ranks import ALONE, Ranks


def save(folder: Path, checkpoint: Checkpoint, ranks: Ranks = ALONE, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint whose tensors lie on all ranks; it is there on all of them when this returns. A collective.

    group: of processes, if not the default one. Without ranks, one process writes a single shard.
    """
    target, scratch = _begin(folder, checkpoint.step, ranks, group)
    flat = {**checkpoint.tensors["model"], **checkpoint.tensors["optimizer"]}
    with room_for(f"checkpoint {target}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process that saves alone, which is meant
        saver.save(
            flat,
            storage_writer=HuggingFaceStorageWriter(str(scratch), save_distributed=True),
            process_group=group,
            no_dist=ranks.alone,
        )
    mine = {path.name: file_digest(path) for path in scratch.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors")}
    sums = [mine]
    if not ranks.alone:
        sums = [{} for _ in range(ranks.size)]
        dist.all_gather_object(sums, mine, group=group)
    if ranks.first:
        with room_for(f"checkpoint {target}"):
            files = {name: digest for each in sums for name, digest in each.items()}
            rng = checkpoints.serialized(checkpoint.tensors["rng"])
            files[RNG] = write_file(scratch / RNG, rng, fault=True)
            state: Values = {
                "format": checkpoints.PIECES, "step": checkpoint.step, "ranks": ranks.size, "sha256": files,
                "info": dict(checkpoint.info),
            }  # fmt: skip
            state["seal"] = checkpoints.seal(state)
            write_file(scratch / "state.json", [json.dumps(state, indent=2).encode() + b"\n"], fault=True)
            sync_folder(scratch)
            scratch.rename(target)
            sync_folder(folder)
    _wait(ranks, group)
    return target


def _begin(folder: Path, step: int, ranks: Ranks, group: dist.ProcessGroup | None) -> tuple[Path, Path]:
    """The folder of a checkpoint, and an empty one to write it in."""
    target = folder / checkpoints.name(step)
    scratch = folder / f".writing-{target.name}"
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    _wait(ranks, group)
    return target, scratch


def _wait(ranks: Ranks, group: dist.ProcessGroup | None) -> None:
    if not ranks.alone:
        dist.barrier(group)


class Saver:
    """Saves while training goes on: a copy of the pieces is made at once, and a thread writes it.

    Its ranks talk in a group of their own, so that they do not get between the collectives of an update.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: tuple[int, Future[Path]] | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Copy, and begin to write; what was begun before must be `finished`."""
        assert self.pending is None
        copied = {part: _copied(tensors) for part, tensors in checkpoint.tensors.items()}
        self.pending = checkpoint.step, self.thread.submit(self._write, checkpoint, copied)

    def finished(self, *, wait: bool) -> int | None:
        """The step of a checkpoint that was written since this was last asked. Errors of writing are raised here."""
        if self.pending is None:
            return None
        step, written = self.pending
        if not wait and not written.done():
            return None
        self.pending = None
        written.result()
        return step

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, checkpoint: Checkpoint, copied: Mapping[str, Mapping[str, Tensor]]) -> Path:
        tensors = {
            part: {name: _piece_of(each, copied[part][name]) for name, each in tensors.items()}
            for part, tensors in checkpoint.tensors.items()
        }
        written = save(self.folder, Checkpoint(checkpoint.step, tensors, checkpoint.info), self.ranks, self.group)
        if self.ranks.first:
            checkpoints.tidy(self.folder, self.keep)
        return written


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's pieces as they are now, on the host."""
    return {name: local(tensor.detach()).to("cpu", copy=True) for name, tensor in tensors.items()}


def _piece_of(tensor: Tensor, piece: Tensor) -> Tensor:
    """A copied piece as what it is a piece of, on a mesh of hosts."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return piece
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu":
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    return DTensor.from_local(
        piece, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def newest(folder: Path, ranks: Ranks) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that is whole, and why each damaged one before it is; ranks share the reading."""
    damaged: dict[Path, str] = {}
    for step in ranks.from_first(lambda: list(reversed(checkpoints.steps(folder)))):
        path = folder / checkpoints.name(step)
        reason = ""
        try:
            state = checkpoints.read_state(path)
            checkpoints.check_files(path, state, sorted(state["sha256"])[ranks.rank :: ranks.size])
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{path}: ")
        reasons = [said for said in ranks.tell(reason) if said]
        if not reasons:
            return path, damaged
        damaged[path] = reasons[0]
    if damaged:
        listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise CheckpointError(f"no usable checkpoint in {folder} ({listed}); delete that folder to start over")
    return None, {}


def fill(path: Path, room: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a checkpoint of either format into tensors, pieces or whole, that are there; those that it has."""
    held = stored(path)
    wanted = {name: tensor for name, tensor in room.items() if name in held}
    other = [name for name, tensor in wanted.items() if tuple(held[name].size) != tuple(tensor.shape)]
    if other:
        raise CheckpointError(f"{path}: {other[0]} has another shape there; the checkpoint is of another model")
    read_into(path, wanted)
    return wanted


def rewritten(path: Path, *, pieces: bool) -> Path:
    """Turn a checkpoint into the one-file form, or into pieces (one shard), in its place; whole or not at all."""
    checkpoint = checkpoints.load(path)
    folder, aside = path.parent, path.with_name(f".rewriting-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    written = (save if pieces else checkpoints.save)(aside, checkpoint)
    old = folder / f".before-{path.name}"  # nobody tidies that away, should this be killed between the two renames
    shutil.rmtree(old, ignore_errors=True)
    os.rename(path, old)
    os.rename(written, path)
    sync_folder(folder)
    shutil.rmtree(old)
    shutil.rmtree(aside)
    return path


def describe(path: Path) -> Record:
    """Format, step, the ranks that wrote it and its bytes."""
    state = checkpoints.read_state(path)
    size = sum((path / name).stat().st_size for name in state["sha256"])
    return {
        "step": state["step"], "form": "one" if state["format"] == checkpoints.FORMAT else "pieces",
        "ranks": state.get("ranks", 1), "bytes": size,
    }  # fmt: skip
