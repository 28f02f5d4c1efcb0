"""Tensor parallel by the base's own plan, and FSDP2 with its checkpoints, on two processes against one."""

import json
import subprocess

import pytest

from tests.hf.models import converted
from tests.scale.common import ROOT, environment, ranks

MADE = {
    "llama": ("llama", "delta:blocks=2", None),
    "gpt_neox": ("gpt_neox", "mudd", None),
    "swa": ("llama", "attnres:blocks=2", "swa:window=3,attn,canon,mlp"),
    "mixtral": ("mixtral", "delta:blocks=2", None),
    "values": ("llama", "delta:blocks=2,value=zero_table", None),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, (architecture, design, layout) in MADE.items():
        converted(architecture, design, layout=layout, moved=True).save_pretrained(folder / name)
    done = subprocess.run(
        [*ranks(2), "tests.hf.on_ranks", str(folder), str(folder)],
        cwd=ROOT, env=environment(HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    "case",
    [
        *(f"split {name}" for name in ("llama", "gpt_neox", "swa", "mixtral")),
        *(f"sharded {name}" for name in ("llama", "swa", "mixtral")),
    ],
)
def test_two_processes_are_as_one(case, found):
    gaps = found[case]
    assert gaps["logits"] < 2e-6
    assert gaps["gradients"] < 5e-6
    assert gaps["tokens"]
    assert gaps["saved"]


def test_stream_is_sharded_with_the_root_and_comes_back_in_pieces(found):
    sharding = found["sharding"]
    assert found["sharded llama"]["pieces"] == 1  # every parameter, those of the stream too
    assert sharding["checkpoint"]
    layers = [f"model.layers.{place}" for place in range(2)]
    assert sharding["units"] == ["", "lm_head", "model.embed_tokens", *layers, "model.norm"]


def test_shared_values_of_split_heads_are_refused(found):
    assert "tensor parallelism splits its heads" in found["refused"]
