"""Where the time goes: parts add up to their whole, and a design's own kernels are told from those of `standard`."""

import pytest

from residua.lab.bench import plain, profile
from residua.lab.bench.table import sheets
from residua.model import ModelConfig, Transformer

pytestmark = pytest.mark.slow  # all of them need one measurement, of seconds
STEP = {"depth": 2, "width": 16, "rows": 1, "tokens": 8}
SHAPE = plain.Shape(depth=2, width=128, context=64)


@pytest.fixture(scope="module")
def measured():
    return profile.measure(2, 16, 8, ["delta", "mhc"], STEP, seconds=0.05, shapes=[SHAPE], repeats=2)


def test_what_a_design_adds_is_the_sum_of_its_parts(measured):
    assert [one["design"] for one in measured["added"]] == ["delta", "mhc"]
    for one in measured["added"]:
        assert sum(part["seconds"] for part in one["parts"]) == pytest.approx(one["seconds"])


def test_kernels_of_a_design_are_named(measured):
    found = {one["design"]: {part["part"] for part in one["parts"] if part["seconds"] > 0} for one in measured["added"]}
    assert "kernel: sinkhorn" in found["mhc"] - found["delta"]
    assert {"read, forward", "read, backward"} <= found["delta"] - found["mhc"]


def test_parts_of_the_plain_step(measured):
    """Matrix products with the multiplications of our own count: forward, and twice as many backward."""
    (form,) = [one for one in measured["forms"] if "training step of `standard`, 2 x 128" in one["what"]]
    parts = {part["part"]: part for part in form["parts"]}
    assert {"kernel: rms_norm", "kernel: rms_norm_backward", "torch: aten::mm", profile.REST} <= parts.keys()
    config = ModelConfig(vocab=plain.VOCABULARY, width=SHAPE.width, depth=SHAPE.depth, heads=SHAPE.heads)
    blocks = sum(weight.numel() for weight in Transformer(config).blocks.parameters() if weight.ndim == 2)
    tokens = SHAPE.rows * SHAPE.context
    assert parts["torch: aten::mm"]["multiplies"] >= 3 * tokens * blocks
    assert all(part["seconds"] > 0 for name, part in parts.items() if name != profile.REST)


def test_reads_of_both_types_are_taken_apart(measured):
    told = [one["what"] for one in measured["forms"]]
    assert [f"attend 2048x256 n=4 {dtype}" in told for dtype in ("float32", "bfloat16")] == [True, True]


def test_table_has_every_step(measured):
    (sheet,) = sheets({"profile": measured})
    assert {f"a training step of {name}, above `standard`" for name in ("delta", "mhc")} <= {
        row[0] for row in sheet.rows
    }
