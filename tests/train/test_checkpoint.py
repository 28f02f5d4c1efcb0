"""A checkpoint is whole or is not there; damage is found, named, and the one before is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_save

from residua.lab.common.files import write_file
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.checkpoint import Checkpoint, CheckpointError
from residua.lab.train.reproducible import random_states

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "bfloat16": torch.linspace(-1, 1, 7).bfloat16(),
    "half": torch.linspace(-1, 1, 3).half(),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "step": torch.tensor(3.0),
    "long": torch.tensor([[-1, 2**62]]),
    "int": torch.tensor([1, -2], dtype=torch.int32),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0),
}


def example(step: int) -> Checkpoint:
    tensors = {"model": TENSORS, "optimizer": {"w/step": torch.tensor(float(step))}, "rng": random_states()}
    return Checkpoint(step, tensors, {"valid": {"loss": 0.1 + step}, "seconds": 1 / 3})


def same(one: Checkpoint, two: Checkpoint) -> bool:
    return (one.step, one.info) == (two.step, two.info) and all(
        one.tensors[part].keys() == two.tensors[part].keys()
        and all(
            tensor.dtype == two.tensors[part][name].dtype and torch.equal(tensor, two.tensors[part][name])
            for name, tensor in one.tensors[part].items()
        )
        for part in checkpoints.PARTS
    )


def test_serialized_is_what_the_format_s_own_writer_writes(tmp_path):
    write_file(tmp_path / "mine.safetensors", checkpoints.serialized(TENSORS))
    (tmp_path / "theirs.safetensors").write_bytes(safetensors_save({k: v.contiguous() for k, v in TENSORS.items()}))
    mine, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("mine", "theirs"))
    assert mine.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor)
    assert (tmp_path / "mine.safetensors").stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size


def test_checkpoint_survives_the_disk(tmp_path):
    path = checkpoints.save(tmp_path, example(7))
    assert path == tmp_path / "step-00000007"
    assert same(checkpoints.load(path), example(7))
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json",
    ]  # fmt: skip


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def change_step(file: Path) -> None:
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"step": state["step"] + 1}))


def change_format(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


DAMAGE = [
    *((file, harm) for file in ("model", "optimizer", "rng") for harm in (truncate, flip, empty, Path.unlink)),
    *(("state", harm) for harm in (truncate, flip, empty, Path.unlink, change_step, change_format)),
]
FILES = {"state": "state.json"} | {part: f"{part}.safetensors" for part in checkpoints.PARTS}


@pytest.mark.parametrize(("file", "harm"), DAMAGE, ids=[f"{file}-{harm.__name__}" for file, harm in DAMAGE])
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path, file, harm):
    checkpoints.save(tmp_path, example(4))
    path = checkpoints.save(tmp_path, example(8))
    harm(path / FILES[file])
    with pytest.raises(CheckpointError, match=r"format 99" if harm is change_format else FILES[file]) as caught:
        checkpoints.load(path)
    assert str(path) in str(caught.value)
    found, damaged = checkpoints.newest(tmp_path)
    assert same(found, example(4))
    assert list(damaged) == [path]
    checkpoints.set_aside(damaged)
    assert checkpoints.steps(tmp_path) == [4]
    assert same(checkpoints.load(checkpoints.save(tmp_path, example(8))), example(8))  # its place is free


def test_checkpoints_all_damaged_are_an_error_that_names_each(tmp_path):
    for step in (4, 8):
        flip(checkpoints.save(tmp_path, example(step)) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000008: model.*step-00000004: model.*delete that folder"):
        checkpoints.newest(tmp_path)


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoints.newest(tmp_path / "none") == (None, {})


def test_history_is_bounded_and_leftovers_go(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoints.save(tmp_path, example(step))
        checkpoints.tidy(tmp_path, keep=2)
    assert checkpoints.steps(tmp_path) == [6, 8]
    for leftover in (".writing-step-00000010", ".old-step-00000002"):
        shutil.copytree(tmp_path / "step-00000008", tmp_path / leftover)
        (tmp_path / leftover / "state.json").unlink()
    for step in (1, 3):
        shutil.copytree(tmp_path / "step-00000008", tmp_path / f"damaged-step-{step:08d}")
    assert checkpoints.newest(tmp_path)[0].step == 8
    checkpoints.tidy(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-step-00000003", "step-00000006", "step-00000008",
    ]  # fmt: skip


def test_save_replaces_what_a_killed_writer_left(tmp_path):
    (tmp_path / ".writing-step-00000004").mkdir(parents=True)
    (tmp_path / ".writing-step-00000004" / "model.safetensors").write_bytes(b"half")
    assert same(checkpoints.load(checkpoints.save(tmp_path, example(4))), example(4))


def test_save_fails_whole_when_a_write_fails(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, example(4))

    def broken(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints, "sync_folder", broken)
    with pytest.raises(OSError, match="Input/output"):
        checkpoints.save(tmp_path, example(8))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_training_code_never_runs_what_it_loads():
    """No module of the package may unpickle: no `pickle`, no `torch.load`, no `torch.save`."""
    import residua.lab.train

    for file in Path(residua.lab.train.__file__).parent.glob("*.py"):
        text = file.read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle"):
            assert word not in text, f"{file.name}: {word}"
