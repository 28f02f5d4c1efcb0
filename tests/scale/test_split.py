"""Tensor and sequence parallelism is one process, for every design that mixes no tokens, and no depth read talks."""

from __future__ import annotations

import pytest

import residua
from tests.scale.common import STEPS, TOLERANCE, launch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("on_split", 2, tmp_path_factory.mktemp("split"))


def near(off, steps):
    assert "error" not in off, off
    assert off["steps"] == steps
    assert max(off["logits"], off["gradient"], off["loss"]) <= TOLERANCE, off


@pytest.mark.parametrize("design", residua.names())
def test_split_is_one_process(found, design):
    off = found["laws"][design]
    if "mixes tokens" in off.get("error", ""):
        pytest.xfail("its default mixes tokens")
    near(off, STEPS)
    assert off["start"] == []


@pytest.mark.parametrize("design", residua.names())
def test_no_depth_read_communicates(found, design):
    """A gather a lane and a scatter a sublayer; the embedding scatters, and the head gathers tokens and logits."""
    seen = found["laws"][design]["collectives"]
    assert seen["counts"] == {
        "all_gather_into_tensor": seen["lanes"] + 2, "reduce_scatter_tensor": seen["sublayers"] + 1,
    }  # fmt: skip


def test_other_models_split(found):
    for off in found["other"].values():
        near(off, 2)


def test_what_mixes_tokens_is_refused(found):
    assert found["mixing"]
    assert all("mixes tokens in its stream" in said for said in found["mixing"].values())


def test_what_cannot_be_split_is_refused_in_one_line(found):
    said = found["refused"]
    assert "shares values of attention" in said["values"]
    assert "l0_conv: a conv sublayer mixes neighbouring tokens" in said["taps"]
    assert "l0_attn: its local have parameters a head" in said["local"]
    assert "1 heads and 1 key heads do not split" in said["heads"]
