"""Memory, traffic and time of every rank: against hand values, and against four gloo processes, to 10 %."""

import json
import re
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.cost.ranks import Ranks, predict_ranks
from residua.lab.cost.targets import sized
from residua.lab.cost.timeline import Device, timeline
from residua.model import ModelConfig
from residua.scale.cuts import Link
from residua.scale.layout import Parallel
from residua.scale.pipeline import SCHEDULES, orders
from tests.cost.ranks_worker import ACCUMULATED, MICRO, ROWS, SHAPE, TOKENS
from tests.scale.common import ROOT, environment, ranks

JOBS = [
    "pp=4 gpipe - standard",
    "pp=4 1f1b - attnres",
    "pp=4 interleaved - attnres:blocks=4",
    "pp=4 zero_bubble - delta:blocks=4",
    "pp=2,dp=2 1f1b - depthswa",
    "pp=2,fsdp=2 gpipe units standard",
    "pp=2,fsdp=2 interleaved units attnres:blocks=4",
    "pp=2,fsdp=2 zero_bubble - mudd",
    "fsdp=4 gpipe - delta",
    "fsdp=4 gpipe checkpointed delta",
    "fsdp=4 gpipe accumulated attnres",
    "pp=2,dp=2 1f1b checkpointed attnres",
]


def small(job: str) -> Ranks:
    layout, schedule, how, design = job.split()
    parallel = Parallel.parse(layout)
    micro = MICRO if parallel.pp > 1 else ACCUMULATED if how == "accumulated" else 1
    chosen = ModelConfig(**(SHAPE | {"design": design}))
    return predict_ranks(
        chosen, parallel, rows=ROWS, tokens=TOKENS, microbatches=micro, schedule=schedule,
        checkpointed=how == "checkpointed",
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "jobs.json").write_text(json.dumps(JOBS))
    done = subprocess.run(
        [*ranks(4), "tests.cost.ranks_worker", str(folder / "out.json"), str(folder / "jobs.json")],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_peak_memory_is_as_measured(measured, job):
    cost = small(job)
    for one in measured[job]:
        assert cost.ranks[one["place"]].memory.total == pytest.approx(one["peak"], rel=0.1), one["place"]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_bytes_over_links_are_as_measured(measured, job):
    cost = small(job)
    for one in measured[job]:
        traffic, sent = cost.ranks[one["place"]].traffic, one["sent"]
        assert traffic["pp"] == sent.get("send", 0)  # to the byte
        gathered = sent.get("_allgather_base_", 0) + sent.get("_reduce_scatter_base_", 0)
        pieces = cost.parallel.fsdp
        assert traffic["fsdp"] == pytest.approx(gathered * (pieces - 1) / pieces, rel=0.1)
        if cost.parallel.pp < 3 and cost.parallel.pp * cost.parallel.dp > 1:  # two ranks: an all-reduce sends it once
            assert traffic["dp"] + traffic["shared"] == pytest.approx(sent["allreduce_"], rel=0.1)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8)])
def test_bubble_of_equal_stages(ranks, micro):
    """GPipe and 1F1B: (p - 1) / (m + p - 1) of the step; interleaving by v divides it; zero bubble has less."""
    share = {}
    for name, known in SCHEDULES.items():
        virtual = 2 if known.several else 1
        order = orders(name, ranks, virtual=virtual, microbatches=micro)
        found = timeline(order, [1.0 / virtual] * ranks * virtual, {}, [0.0] * ranks)
        assert found.compute == pytest.approx(3 * micro)
        assert found.communication == 0
        share[name] = found.bubble / found.step
    assert share["gpipe"] == pytest.approx((ranks - 1) / (micro + ranks - 1))
    assert share["1f1b"] == pytest.approx(share["gpipe"])
    assert share["interleaved"] == pytest.approx((ranks - 1) / (2 * micro + ranks - 1))
    assert share["zero_bubble"] < share["interleaved"]


def test_orders_are_whole_passes():
    for name, known in SCHEDULES.items():
        virtual = 2 if known.several else 1
        for rank, mine in enumerate(orders(name, 2, virtual=virtual, microbatches=4)):
            for stage in range(rank, 2 * virtual, 2):
                counted = {action: mine.count((action, stage)) for action in "FBIW"}
                halves = {"B": 0, "I": 4, "W": 4} if known.split else {"B": 4, "I": 0, "W": 0}
                assert counted == {"F": 4} | halves


def test_communication_by_hand():
    """One micro-batch through two stages: arithmetic of both, two sends, and the longest collective."""
    order = orders("gpipe", 2, virtual=1, microbatches=1)
    link = Link(stage=0, source=0, target=1, tensors=1, forward=200, backward=100)
    device = Device(inside=100.0, between=10.0, machine=2)
    hops = device.hops([link], Parallel(pp=2))
    assert hops == {("F", 0): 2.0, ("B", 0): 1.0}
    found = timeline(order, [1.0, 2.0], hops, [0.5, 0.0])
    assert (found.compute, found.bubble, found.communication) == (6.0, 3.0, 3.5)
    assert device.bandwidth("pp", Parallel(pp=2, fsdp=2)) == 10.0
    assert device.bandwidth("fsdp", Parallel(pp=2, fsdp=2)) == 100.0


def test_blocks_that_run_again_take_a_forward_pass_more():
    config, how = sized("demo").config, {"rows": 4, "tokens": 32, "microbatches": 2}
    once, again = (predict_ranks(config, Parallel(pp=2), checkpointed=kind, **how) for kind in (False, True))
    assert again.time.compute == pytest.approx(once.time.compute * 4 / 3)
    assert again.ranks[0].memory.activations == 0 < once.ranks[0].memory.activations


def test_sharding_divides_what_it_shards():
    target = sized("demo", depth=4)
    one, eight = (
        predict_ranks(target.config, Parallel.parse(text), rows=8, tokens=64).ranks[0] for text in ("dp=1", "fsdp=8")
    )
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(eight.memory, part) == pytest.approx(getattr(one.memory, part) / 8, rel=0.01)
    assert one.memory.gathered == 0 < eight.memory.gathered
    assert one.memory.activations == eight.memory.activations
    assert set(one.traffic.values()) == {0}
    split = predict_ranks(target.config, Parallel(tp=2), rows=8, tokens=64).ranks[0]
    assert split.memory.activations == one.memory.activations // 2
    assert split.traffic["tp"] == 4 * 8 * 8 * 64 * 64 * 4 // 2  # 8 sublayers, a gather and a scatter, both ways


@pytest.mark.slow
def test_incremental_transport_shows_in_the_account():
    """48 blocks, 4 ranks x 2 stages: 35 tensors a micro-batch, or 21."""
    config = sized("demo", depth=48, width=16, heads=2).of("attnres:blocks=8").config
    how = {"rows": 8, "tokens": 16, "schedule": "interleaved", "microbatches": 8}
    whole, fewer = (predict_ranks(config, Parallel(pp=4), incremental=kind, **how) for kind in (False, True))
    assert sum(link.tensors for link in whole.links) == 35
    assert sum(link.tensors for link in fewer.links) == 21
    sent = [sum(one.traffic["pp"] for one in cost.ranks) for cost in (whole, fewer)]
    assert sent == [2 * 8 * 16 * 16 * 4 * tensors for tensors in (35, 21)]
    assert fewer.time.step < whole.time.step


def run(*flags: str) -> str:
    done = CliRunner().invoke(app, ["cost", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_command_shows_every_rank():
    said = run("--size", "7.6B", "--parallel", "pp=4,fsdp=8", "-d", "attnres:blocks=8", "--dtype", "bfloat16")
    assert re.search(r"attnres:blocks=8: per rank +pp 0 +pp 1 +pp 2 +pp 3", said)
    for line in ("optimizer", "depth state", "pipeline buffers", "sent between stages", "communication."):
        assert line in said
    assert "pp=4,fsdp=8: 32 ranks, 8 micro-batches of 1 x 2048 tokens" in said


def test_command_prints_json():
    flags = ["--size", "demo", "--parallel", "pp=2", "--tokens", "16", "--schedule", "1f1b", "--json"]
    found = json.loads(run(*flags))["designs"]["standard"]
    assert found["parallel"] == {"pp": 2, "dp": 1, "fsdp": 1, "tp": 1}
    for rank in found["ranks"]:
        total = rank["memory"].pop("total")
        assert total == sum(rank["memory"].values())
    slow = json.loads(run(*flags, "--inside", "0.001"))["designs"]["standard"]
    assert slow["time"]["communication_share"] > found["time"]["communication_share"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parallel", "pp=8"], "pp=8 with 2 stages a rank is 16 stages, and the model has 4 blocks"),
        (["--parallel", "qq=2"], "'qq=2' is not one of"),
        (["--parallel", "pp=2", "--schedule", "zbv"], "unknown schedule 'zbv'"),
        (["--parallel", "pp=2", "--schedule", "zero_bubble", "-d", "ddl:channels=2"], "cannot split the backward pass"),
        (["--parallel", "tp=3"], "tp=3 does not divide"),
        (["--parallel", "pp=2", "--measure"], "exclude each other"),
        (["--parallel", "pp=2", "--layout", "attn,mlp,loop:passes=2"], "cannot be cut into pipeline stages"),
    ],
)
def test_wrong_layout_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["cost", "--size", "demo", *flags], catch_exceptions=False)


def test_types_of_what_is_kept_and_sent():
    config = sized("demo").config
    how = {"rows": 4, "tokens": 32, "microbatches": 4, "schedule": "1f1b"}
    wide, narrow = (
        predict_ranks(config, Parallel(pp=2), dtype=kind, **how).ranks[0] for kind in (torch.float32, torch.bfloat16)
    )
    assert wide.memory.optimizer == narrow.memory.optimizer
    assert wide.traffic["pp"] == 2 * narrow.traffic["pp"]
