"""DDP and FSDP2 on two processes are one process, for every design: outputs, all gradients, 20 updates, the start."""

from __future__ import annotations

import pytest

import residua
from residua import Plan
from residua.registry import design as class_of
from tests.scale.common import STEPS, found_by, near

pytestmark = pytest.mark.slow
CASES = [f"{name}:{case}" for name in residua.names() for case in class_of(name).cases if case]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by(tmp_path_factory, "on_two", 2)


@pytest.mark.parametrize("design", residua.names())
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_are_one(found, design, way):
    laws = found["laws"][design]
    near(laws[f"{way} plain"], STEPS)
    near(laws[f"{way} accumulate"], 2)
    near(laws[f"{way} checkpointed"], 2)


@pytest.mark.parametrize("design", residua.names())
def test_two_processes_are_one_that_accumulates_to_the_last_bit(found, design):
    laws = found["laws"][design]
    assert laws["ddp plain"]["losses"] == laws["one process, two parts"]


@pytest.mark.parametrize("case", CASES)
def test_every_option_shards(found, case):
    near(found["options"][case], 1)


@pytest.mark.parametrize("design", residua.names())
def test_a_model_built_on_meta_and_sharded_starts_as_the_whole_one(found, design):
    start = found["start"][design]
    assert start.get("differing") == [], start
    assert start["share"] < 0.55  # of the numbers: a process holds its half


def test_untied_heads_and_local_mixers_start_as_the_whole_ones(found):
    assert found["start of layouts"].get("differing") == [], found["start of layouts"]


def test_loops_and_shared_values_shard(found):
    for off in (*found["loops"].values(), *found["value"].values()):
        near(off, 1)
        assert off["differing"] == []


def test_a_block_and_its_part_of_the_stream_are_one_unit(found):
    """Six blocks and the root: a gather each, a second one a block for the backward pass, a scatter each."""
    seen = found["collectives"]
    assert seen["forward"] == {"_allgather_base_": 7}
    assert seen["all"] == {"_allgather_base_": 13, "_reduce_scatter_base_": 7}
    assert seen["whole"] == 1  # of six, in the last block
    assert {name.split(".")[2] for name in seen["stream in root"]} == {"head"}


@pytest.mark.parametrize("stream", ["bfloat16", "float32"])
@pytest.mark.parametrize("design", residua.names())
def test_mixed_precision_keeps_what_routes_in_float32(found, design, stream):
    """The same casts as under autocast in one process: what is left are sums of bfloat16 in another order."""
    seen = found["mixed"][f"{design} {stream}"]
    assert "error" not in seen, seen
    assert seen["stream"] in ([], ["torch.float32"])
    normed = any(residua.build(design, Plan.regular(8, 2)).takes_norm(site) for site in Plan.regular(8, 2).sites)
    assert (seen["norm"], seen["matrix"]) == (["torch.float32"] if normed else [], ["torch.bfloat16"])
    assert seen["state"] == [f"torch.{stream}"]
    assert seen["gradient"] <= (2e-2 if stream == "bfloat16" else 1e-6), seen


def test_inputs_are_not_cast_under_a_float32_stream(found):
    assert "cast_inputs rounds the stream" in found["refused"]


def test_pieces_may_stay_on_the_host(found):
    near(found["offload"], 3)
