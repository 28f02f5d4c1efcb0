"""Every design in a pipeline is the network of one process: outputs, losses, every gradient, parameters after steps.

Two launches, of 2 and of 4 gloo processes, run all cases in float64 and report; the tests judge case by case.
"""

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

import residua
from residua.model import Transformer
from residua.registry import wrappers
from residua.scale.cuts import Cuts
from residua.scale.pipeline import SCHEDULES, check
from residua.testing import TOLERANCE, specs
from tests.scale.common import ROOT, environment, ranks
from tests.scale.pipeline_worker import DEPTH, config

DESIGNS = [*residua.names(), *(case for wrapper in wrappers().values() for case in wrapper.cases)]
EXACT = 1e-10


@cache
def meta(design: str) -> Cuts:
    with torch.device("meta"):
        return Cuts.of(Transformer(config(design)), 1, 4)


def refused(job: str) -> bool:
    """Zero-bubble schedules split no stage in which sites share parameters, and no nested FSDP units."""
    how, _, design = job.partition(" ")
    blocks = 2 if "deep" in how else 1
    stages = [range(layer, layer + blocks) for layer in range(0, DEPTH, blocks)]
    return "zero_bubble" in how and ("units" in how or any(map(meta(design).repeated, stages)))


def kinds() -> list[str]:
    """One spec of every kind of boundary: what a state is made of, what learns, and who shares parameters. What else
    tells two specs apart happens inside a block."""
    found: dict[object, str] = {}
    for spec in (spec for name in residua.names() for spec in specs(name)):
        cuts = meta(spec)
        trees = tuple((str(one.tree), one.leaves) for one in cuts.at)
        like = tuple((label, one.ndim, one.requires_grad) for label, one in cuts.like.items())
        shared = sorted({tuple(sorted(blocks)) for blocks in cuts.users.values()})
        found.setdefault((trees, like, str(shared)), spec)
    return [spec for spec in found.values() if spec not in DESIGNS]


TWO = [
    *(f"interleaved {design}" for design in DESIGNS),
    *(f"zero_bubble {design}" for design in DESIGNS),
    *(f"1f1b/long {design}" for design in residua.names()),
    "gpipe standard", "gpipe attnres", "gpipe depthswa", "gpipe/untied standard:value=table",
    "interleaved/whole attnres", "interleaved/whole delta:blocks=2,value=zero_table",
    "interleaved/deep attnres:blocks=2", "interleaved/deep depthswa", "interleaved/deep delta:value=learned",
    "interleaved/grouped attnres", "interleaved/grouped/deep delta:blocks=2", "zero_bubble/grouped attnres",
    "interleaved/documents attnres", "1f1b/documents delta:value=learned", "interleaved/checkpointed delta",
    "zero_bubble/untied mudd", "zero_bubble/deep depthswa",
]  # fmt: skip
NARROW = [f"interleaved/autocast {design}" for design in ("standard", "attnres", "hyper", "delta:value=learned")]
FOUR = [
    "1f1b attnres", "interleaved/deep attnres:blocks=4", "zero_bubble/deep delta:blocks=4",
    "interleaved/dp attnres", "zero_bubble/dp hyper", "1f1b/dp standard:value=table",
    "gpipe/fsdp depthswa", "1f1b/units hyper", "interleaved/units depthswa", "interleaved/units ddl:channels=2",
    "interleaved/fsdp attnres:blocks=2", "zero_bubble/fsdp delta", "zero_bubble/units delta",
]  # fmt: skip


def launch(folder: Path, processes: int, jobs: list[str]) -> dict[str, dict]:
    out, wanted = folder / "out.json", folder / "jobs.json"
    wanted.write_text(json.dumps(jobs))
    done = subprocess.run(
        [*ranks(processes), "tests.scale.pipeline_worker", str(out), str(wanted)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    others = [f"interleaved {spec}" for spec in kinds()]
    return launch(tmp_path_factory.mktemp("two"), 2, [*TWO, *others, *NARROW, "interleaved/inferred attnres"])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("four"), 4, [*FOUR, "zero_bubble torch"])


def judge(found: dict, job: str) -> None:
    assert job in found, f"not run: {list(found)[-1]} ended the launch, {found[list(found)[-1]]}"
    result = found[job]
    if refused(job):
        assert "a zero-bubble schedule" in result.get("error", ""), result
        return
    assert "error" not in result, result["error"]
    assert result["bits"], "the start is another"
    assert not result["missing"], "no rank has these parameters"
    worst = {key: result[key] for key in ("outputs", "losses", "gradients", "parameters")}
    assert max(worst.values()) <= EXACT, worst
    assert result["bytes"], "the links carry other bytes than was predicted"
    assert not result["kept"], "something is left in a depot"


@pytest.mark.slow
@pytest.mark.parametrize("job", TWO)
def test_two_ranks_are_one_process(two, job):
    judge(two, job)


@pytest.mark.slow
def test_every_kind_of_boundary_is_one_process(two):
    for spec in kinds():
        judge(two, f"interleaved {spec}")


@pytest.mark.slow
@pytest.mark.parametrize("job", FOUR)
def test_four_ranks_are_one_process(four, job):
    judge(four, job)


@pytest.mark.slow
@pytest.mark.parametrize("job", NARROW)
def test_autocast_around_a_float32_stream(two, job):
    """Sublayers compute in bfloat16, the state that crosses the cuts is float32. Sums in another order are then rounded
    to another bfloat16 now and then."""
    assert "error" not in two[job], two[job]
    assert two[job]["gradients"] <= TOLERANCE[torch.bfloat16][1], two[job]


@pytest.mark.slow
def test_incremental_transport_sends_less(two):
    whole, fewer = two["interleaved/whole attnres"]["sent"], two["interleaved attnres"]["sent"]
    assert fewer < 0.5 * whole


@pytest.mark.slow
def test_shapes_that_torch_infers_leave_gradients_behind(two):
    """Canary: inference is a real pass, and what it leaves is added to the first step. If this fails, torch got better
    and stages need not be told."""
    assert not two["interleaved/inferred attnres"]["gradients"] <= 1e-3  # NaN, or any other number


@pytest.mark.slow
def test_zero_bubble_loses_gradients_of_nested_units(four):
    """Canary, without residua: right with one FSDP unit a stage, silently wrong with two in it. If this fails, torch
    got better and the refusal can go."""
    assert four["zero_bubble torch"]["one unit"] == 0
    assert four["zero_bubble torch"]["nested"] > 0


def test_fused_adam_reads_a_strided_gradient_as_dense():
    """Canary, without residua: why the pipeline leaves dense gradients. If this fails, torch got better."""
    base = torch.randn(4, 5, dtype=torch.float64)
    means = []
    for gradient in (base[:, 1:], base[:, 1:].contiguous()):
        parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter], fused=True)
        optimizer.step()
        means.append(optimizer.state[parameter]["exp_avg"])
    assert not torch.equal(*means)


@pytest.mark.parametrize(
    ("stages", "schedule", "how", "message"),
    [
        (8, "gpipe", {}, "pp=8 with 1 stages a rank is 8 stages, and the model has 4 blocks"),
        (4, "interleaved", {}, "is 8 stages"),
        (2, "1f1b", {"virtual": 2}, "has one stage a rank"),
        (2, "1f1b", {"microbatches": 3}, "8 rows do not split into 3 micro-batches"),
        (4, "1f1b", {"microbatches": 2}, "as many micro-batches as stages"),
        (2, "interleaved", {"microbatches": 5, "rows": 10}, "do not make whole rounds"),
        (2, "zbv", {}, "unknown schedule 'zbv'; choose from gpipe, 1f1b, interleaved, zero_bubble"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_before_it_starts(stages, schedule, how, message):
    with pytest.raises(ValueError, match=message):
        check(config("standard"), stages, schedule, **({"microbatches": 4, "rows": 8} | how))


def test_loops_are_refused():
    with pytest.raises(ValueError, match="drop pp or the loop"):
        check(config("standard", layout="attn,mlp,loop:passes=2"), 2, "gpipe", microbatches=2, rows=4)
    once = config("standard", layout="attn,mlp,loop:passes=1")
    assert check(once, 2, "gpipe", microbatches=2, rows=4) == 2


def test_schedules_are_all_run():
    assert {job.split()[0].split("/")[0] for job in TWO} == set(SCHEDULES)
