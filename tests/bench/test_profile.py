"""Where the time goes: parts add up to their whole, and a design's own kernels are told from those of `standard`."""

import pytest

from residua.lab.bench import profile
from residua.lab.bench.table import sheets

STEP = {"depth": 2, "width": 16, "rows": 1, "tokens": 8}


@pytest.fixture(scope="module")
def measured():
    return profile.measure(2, 16, 8, ["delta", "mhc"], STEP, seconds=0.05, repeats=2)


def test_what_a_design_adds_is_the_sum_of_its_parts(measured):
    assert [one["design"] for one in measured["added"]] == ["delta", "mhc"]
    for one in measured["added"]:
        assert sum(part["seconds"] for part in one["parts"]) == pytest.approx(one["seconds"])


def test_kernels_of_a_design_are_named(measured):
    found = {one["design"]: {part["part"] for part in one["parts"] if part["seconds"] > 0} for one in measured["added"]}
    assert "kernel: sinkhorn" in found["mhc"] - found["delta"]
    assert {"read, forward", "read, backward"} <= found["delta"] - found["mhc"]


def test_table_has_every_step(measured):
    (sheet,) = sheets({"profile": measured})
    assert {f"a training step of {name}, above `standard`" for name in ("delta", "mhc")} <= {
        row[0] for row in sheet.rows
    }
