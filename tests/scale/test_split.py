"""Tensor and sequence parallelism is one process, for every design that mixes no tokens, and no depth read talks."""

from __future__ import annotations

import pytest

import residua
from residua.model import Transformer
from tests.scale.common import STEPS, described, found_by, near

pytestmark = pytest.mark.slow


def _refused(design):
    stream = Transformer(described(design)).stream
    return stream.mixes_tokens or stream.takes_ids or stream.sided


REFUSED = [design for design in residua.names() if _refused(design)]
"""Designs that by default mix tokens, look up ids or share values of attention."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by(tmp_path_factory, "on_split", 2)


@pytest.mark.parametrize("design", residua.names())
def test_split_is_one_process(found, design):
    off = found["laws"][design]
    if design in REFUSED:
        assert off["error"].startswith("ValueError: tp=2: ")
        return
    near(off, STEPS)
    assert off["start"] == []


@pytest.mark.parametrize("design", [name for name in residua.names() if name not in REFUSED])
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
