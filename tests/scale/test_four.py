"""Copies of a sharded model (HSDP) and copies of a split one, on four processes, are one process."""

from __future__ import annotations

from tests.scale.common import TOLERANCE, launch


def test_two_axes_are_one_process(tmp_path):
    found = launch("on_four", 4, tmp_path)
    assert found.keys() == {"dp=2,fsdp=2", "dp=2,tp=2"}
    for designs in found.values():
        for off in designs.values():
            assert "error" not in off, off
            assert max(off["logits"], off["gradient"], off["loss"]) <= TOLERANCE, off
