"""Every Triton kernel compiles to machine code for real GPUs, which takes none: the interpreter accepts more than the
compiler does, and says nothing about registers, shared memory and the width of loads.

`residua bench kernels` compiles all of them for four kinds of GPU into results/bench/kernels.json. The table is of the
sources as they are, which a digest says; a part of it is compiled here again."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import triton

from residua.lab.bench import record
from residua.lab.bench.table import markdown, sheets
from residua.lab.gpu import compiled
from residua.lab.gpu.cases import CASES

TABLE = record.read(Path(__file__).parents[2] / "results" / "bench" / "kernels.json")["kernels"]
TARGETS = {target.name: target for target in compiled.TARGETS}


def test_table_is_of_these_sources():
    """Else: residua bench kernels --out results/bench/kernels.json."""
    assert TABLE["sources"] == compiled.digest()


def test_table_has_every_kernel_without_a_spill():
    seen = {(row["case"], row["dtype"], row["width"]) for row in TABLE["rows"]}
    assert seen == {
        (case.name, str(dtype).removeprefix("torch."), width)
        for case in CASES for dtype, width in compiled.SHAPES if dtype in case.types
    }  # fmt: skip
    for row in TABLE["rows"]:
        assert row["targets"].keys() == TARGETS.keys(), row
        for name, usage in row["targets"].items():
            assert usage["spills"] == 0, (row["case"], row["kernel"], name)
            assert usage["shared"] <= TARGETS[name].shared
            assert usage["fits"]
    graded = {case.name for case in CASES if case.graded}
    backward = {row["case"] for row in TABLE["rows"] if "backward" in row["kernel"]}
    assert graded == backward


def test_reads_load_as_much_at_a_time_as_the_hardware_can():
    """16 bytes, though the addresses come out of a table."""
    for row in TABLE["rows"]:
        reads = row["case"].startswith(("attend", "mix", "remix", "delta_write")) and "table" not in row["kernel"]
        if reads and row["dtype"] == "bfloat16":
            assert all(row["targets"][name]["widest"] == 16 for name in ("sm_80", "sm_90", "sm_100")), row


# one op for each target, another for the next: all targets, and most ops, in a few seconds
PART = [
    (case, compiled.TARGETS[i // 2 % 4]) for i, case in enumerate(CASES) if i % 2 == 0 and torch.bfloat16 in case.types
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), PART, ids=lambda one: one.name)
def test_part_of_the_table_compiles_again(case, target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled.compiled(case, torch.bfloat16, 768, target)
    assert all(usage.fits(target) for usage in found)
    rows = {
        row["kernel"]: row["targets"][target.name]
        for row in TABLE["rows"] if (row["case"], row["dtype"], row["width"]) == (case.name, "bfloat16", 768)
    }  # fmt: skip
    assert {usage.kernel for usage in found} == rows.keys()
    if triton.__version__ == TABLE["triton"]:
        for kernel, row in rows.items():
            assert max(usage.registers for usage in found if usage.kernel == kernel) == row["registers"]


def test_table_is_shown():
    (sheet,) = sheets({"kernels": TABLE})
    assert sheet.columns == ["op", "kernel", "sm_80", "sm_90", "sm_100", "gfx942", "spills"]
    assert {row[-1] for row in sheet.rows} == {"0"}
    assert "bfloat16 4096" in markdown(sheet)


def test_a_spill_and_too_much_memory_are_seen():
    target = TARGETS["sm_80"]
    usage = compiled.Usage("kernel", 4, 64, 0, 4096, 16)
    assert usage.fits(target)
    assert not usage._replace(spills=4).fits(target)
    assert not usage._replace(shared=target.shared + 1).fits(target)
    assert not usage._replace(warps=16, registers=255).fits(target)
