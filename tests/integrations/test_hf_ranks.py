"""Converted models on two processes, by HF's Trainer (DDP) and under `fully_shard`: saved, loaded, equal to one.

Trainer's own FSDP is not run: accelerate leaves its FSDP2 plugin aside on CPUs and takes DDP.
"""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf.models import ids
from tests.integrations.on_ranks import DESIGNS
from tests.scale.common import ROOT, environment, ranks

pytestmark = pytest.mark.slow  # processes of their own


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    for count, command in ((1, [sys.executable, "-m"]), (2, ranks(2))):
        done = subprocess.run(
            [*command, "tests.integrations.on_ranks", str(out / str(count))],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("way", ["trainer", "sharded"])
@pytest.mark.parametrize("design", DESIGNS)
def test_two_processes_save_what_one_does(found, design, way):
    place = str(DESIGNS.index(design))
    one, two = (AutoModelForCausalLM.from_pretrained(found / count / place / way, dtype="auto") for count in "12")
    weights = one.state_dict()
    assert two.state_dict().keys() == weights.keys()
    assert next(two.parameters()).dtype == torch.float64
    for name, each in two.state_dict().items():
        torch.testing.assert_close(each, weights[name], rtol=1e-10, atol=1e-10, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(two(ids()).logits, one(ids()).logits, rtol=1e-9, atol=1e-9)


def test_trainer_wrapped_the_model(found):
    assert (found / "2/0/wrapped").read_text() == "DistributedDataParallel"
