"""What `residua doctor --device cuda` and `residua bench --device cuda` do, at small sizes and, without a GPU, on the
interpreter."""

import pytest
import torch

from residua import ops
from residua.lab.bench import decode, model, stack
from residua.lab.bench.table import markdown, sheets
from residua.lab.bench.timing import CONTROL, Timing
from residua.lab.gpu import check, measure
from residua.lab.gpu.cases import CASES

from .triton_check import DEVICE

WHERE = torch.device(DEVICE)
TINY = measure.Sizes(
    designs=("delta",), checked=(), read=(8, 16, 2), ops=("attend", "delta_write"), shapes=("8x16",), counts=(2,),
    types=(torch.float32,), depths=(2,), width=64, tokens=8, rows=1, contexts=(8,), seconds=0.0,
)  # fmt: skip


def test_every_kernel_is_right_by_its_check():
    rows = check.check(WHERE, [(17, 24, 3)])
    assert len(rows) == sum(len(case.types) for case in CASES)
    assert check.failed(rows) == []
    assert all(row["output"] is not None for row in rows)
    assert all((row["gradient"] is None) != case.graded for case in CASES for row in rows if row["case"] == case.name)


def test_a_wrong_or_failing_kernel_is_a_row(monkeypatch):
    case = next(case for case in CASES if case.name == "shortconv")
    real = ops._backend.registered("shortconv", DEVICE)[1]
    served = ops._backend._kernels
    monkeypatch.setitem(served, ("shortconv", DEVICE), ("triton", lambda *given: 1.01 * real(*given)))
    (row, *_) = check.check(WHERE, [(2, 4, 1)], [case])
    assert "is off by" in row["reason"]

    def broken(*given):
        raise RuntimeError("out of resources: shared memory\nand more")

    monkeypatch.setitem(served, ("shortconv", DEVICE), ("triton", broken))
    assert check.failed(check.check(WHERE, [(2, 4, 1)], [case]))[0].endswith(
        "RuntimeError: out of resources: shared memory"
    )


def once(forms, *, controlled, **budget):
    """Every form once, for what it does and not for how long: the interpreter takes seconds for a step."""
    for form in forms.values():
        form()
    return Timing({label: [1.0] * 6 for label in (*forms, CONTROL)})


def test_every_table_is_measured(monkeypatch):
    for part in (stack, model, decode):
        monkeypatch.setattr(part, "interleave", once)
    said = []
    with ops.backend("auto", strict=True):
        found = measure.measure(WHERE, TINY, said.append)
    assert {"device", "check", "read", "ops", "stack", "model", "decode"} <= found.keys()
    assert found["read"]["public"] == {}
    assert [row["op"] for row in found["ops"]["rows"]] == ["attend", "delta_write"]
    assert any("measuring attend 8x16" in line for line in said)
    text = "".join(markdown(sheet) for sheet in sheets(found))
    assert "One read, forward: 2 sources of 8 x 16" in text
    assert "A training step over that of `standard`" in text


def test_other_devices_are_refused_in_one_line():
    with pytest.raises(ValueError, match="for cuda"):
        check.require("mps")
