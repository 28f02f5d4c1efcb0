"""Cache files: whole or absent under byte flips, cuts, kills, a full disk and several writers at once."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from residua.lab.data import store
from residua.lab.data.store import Corrupted, fetch, load, save

RECORD = {"content": "abc", "count": 3}
ARRAYS = {"train": np.arange(40, dtype=np.uint16), "ends": np.array([7, 2**40], dtype=np.uint64)}

WRITER = """
import importlib.util, sys
from pathlib import Path
import numpy as np
spec = importlib.util.spec_from_file_location("store", sys.argv[1])
store = importlib.util.module_from_spec(spec)
sys.modules["store"] = store
spec.loader.exec_module(store)
path, items = Path(sys.argv[2]), int(sys.argv[3])
"""


def run(code, *arguments):
    """A process that has `store` and nothing else of residua, so that it starts at once."""
    command = [sys.executable, "-c", WRITER + code, store.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return out


def same(entry, record=RECORD, arrays=ARRAYS):
    return (
        entry.record == record
        and list(entry.arrays) == list(arrays)
        and all(np.array_equal(entry.arrays[name], array) for name, array in arrays.items())
    )


def test_store_round_trip_is_a_safetensors_file(tmp_path):
    path = tmp_path / "a" / "b.safetensors"
    save(path, RECORD, ARRAYS)
    entry = load(path)
    assert same(entry)
    assert entry.arrays["train"].dtype == np.uint16
    read = load_file(path)
    assert read.keys() == ARRAYS.keys()
    assert all(np.array_equal(read[name], array) for name, array in ARRAYS.items())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_store_arrays_are_read_only_maps(tmp_path):
    save(tmp_path / "x", RECORD, ARRAYS)
    array = load(tmp_path / "x").arrays["train"]
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("bit", [0, 5])
def test_store_flipped_bit_is_found_or_harmless(tmp_path, bit):
    path = tmp_path / "x"
    save(path, RECORD, ARRAYS)
    whole = path.read_bytes()
    found = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        try:
            assert same(load(path)), f"byte {place} changed the content and was not noticed"
        except Corrupted:
            found += 1
    assert found > 0.95 * len(whole)  # padding and the order of digits in a number may not matter


def test_store_cut_or_grown_file_is_found(tmp_path):
    path = tmp_path / "x"
    save(path, RECORD, ARRAYS)
    whole = path.read_bytes()
    for changed in (*(whole[:length] for length in range(len(whole))), whole + b"\0", b"\xff" * 64):
        path.write_bytes(changed)
        with pytest.raises(Corrupted):
            load(path)


def test_store_fetch_builds_once_and_again_after_damage(tmp_path):
    path = tmp_path / "x"
    built, said = [], []

    def build():
        built.append(1)
        return RECORD, ARRAYS

    for _ in range(2):
        assert same(fetch(path, build, said.append))
    assert (len(built), said) == (1, [])
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert same(fetch(path, build, said.append))
    assert len(built) == 2
    assert len(said) == 1
    assert str(path) in said[0]
    assert "checksum" in said[0]
    assert same(load(path))


def test_store_full_disk_keeps_the_old_file(tmp_path):
    """The kernel refuses the write, as a full disk does: a limit on the size of files, in a process of its own."""
    path = tmp_path / "x"
    save(path, RECORD, ARRAYS)
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.save(path, {}, {"train": np.arange(items, dtype=np.uint32)})
except OSError as error:
    print(error)
"""
    said = finished(run(code, path, 100_000))
    assert str(path) in said
    assert "RESIDUA_CACHE" in said
    assert said.count("\n") == 1
    assert same(load(path))
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.08])
def test_store_killed_writer_keeps_a_whole_file(tmp_path, after):
    path = tmp_path / "x"
    save(path, RECORD, ARRAYS)
    code = """
print("ready", flush=True)
while True:
    store.save(path, {"by": "writer"}, {"train": np.arange(items, dtype=np.uint32)})
"""
    process = run(code, path, 1_000_000)
    assert process.stdout.readline() == "ready\n"
    time.sleep(after)
    process.kill()
    process.communicate()
    entry = load(path)
    assert same(entry) or same(entry, {"by": "writer"}, {"train": np.arange(1_000_000, dtype=np.uint32)})


def test_store_writers_and_reader_at_once(tmp_path):
    path = tmp_path / "x"
    expected = {"train": np.arange(50_000, dtype=np.uint16)}
    code = """
for _ in range(20):
    store.save(path, {"n": 1}, {"train": np.arange(items, dtype=np.uint16)})
"""
    writers = [run(code, path, 50_000) for _ in range(3)]
    read = 0
    while any(writer.poll() is None for writer in writers):
        try:
            entry = load(path)
        except FileNotFoundError:
            assert read == 0, "a file that was there is gone"
            continue
        assert same(entry, {"n": 1}, expected)
        read += 1
    for writer in writers:
        finished(writer)
    assert read > 0
    assert same(load(path), {"n": 1}, expected)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_store_sweeps_only_old_leftovers(tmp_path):
    old, young = tmp_path / ".y.1.part", tmp_path / ".y.2.part"
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    save(tmp_path / "x", RECORD, ARRAYS)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".y.2.part", "x"]


def test_store_unusable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write .*set RESIDUA_CACHE to another folder$"):
        fetch(tmp_path / "file" / "tokens" / "x", lambda: (RECORD, ARRAYS), print)
