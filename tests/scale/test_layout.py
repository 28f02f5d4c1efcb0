"""`Parallel`: what is written, what is refused, and which layout `auto` takes."""

from __future__ import annotations

import pytest

from residua.model import ModelConfig
from residua.scale.layout import Parallel, choose

MODEL = ModelConfig(vocab=64, width=32, depth=4, heads=4, kv_heads=2)


def test_layout_is_read_and_written():
    layout = Parallel.parse("fsdp=4,dp=2")
    assert layout == Parallel(dp=2, fsdp=4)
    assert (layout.ranks, layout.copies, str(layout)) == (8, 8, "dp=2,fsdp=4")
    assert Parallel(**layout.to_json()) == layout
    assert str(Parallel()) == "dp=1"


def test_ranks_of_one_copy_are_neighbours():
    layout = Parallel(dp=2, tp=2)
    assert [layout.copy_of(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=x", "dp=2,dp=2", "cp=2", "dp=-1"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="write such as dp=2,fsdp=4"):
        Parallel.parse(text)


def test_all_that_is_wrong_is_one_error():
    with pytest.raises(ValueError) as refused:
        Parallel(pp=8, dp=3, tp=4).check(MODEL, 4, batch=8, context=10)
    said = str(refused.value)
    assert "96 processes and 4 were started" in said
    assert "more stages than there are blocks, 4" in said
    assert "batch 8 does not split over dp x fsdp = 3" in said
    assert "tp=4 does not divide the 4 heads and 2 key heads" in said
    assert "tp=4 does not divide the context of 10" in said
    Parallel(dp=2, tp=2).check(MODEL, 4, batch=8, context=10)


def test_blocks_that_repeat_have_no_stages():
    looped = ModelConfig(vocab=64, width=32, depth=4, heads=4, layout="attn,mlp,loop:passes=2")
    with pytest.raises(ValueError, match="cannot be cut into stages"):
        Parallel(pp=2).check(looped, 2)


@pytest.mark.parametrize(
    ("share", "chosen"), [(10, Parallel(dp=8)), (0.6, Parallel(dp=4, fsdp=2)), (0.16, Parallel(fsdp=8)), (1e-3, None)]
)
def test_auto_shards_as_little_as_fits(share, chosen):
    from residua.model import measure

    memory = int(share * 16 * measure(MODEL, 8).parameters / 0.85)
    layout, why = choose(MODEL, 8, memory, rows=8, context=1)
    assert layout == (chosen or Parallel(fsdp=8))
    assert str(layout) in why
    assert ("not even" in why) is (chosen is None)
