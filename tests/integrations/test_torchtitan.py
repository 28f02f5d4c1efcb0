"""Every design through torchtitan's contract on two processes: the start to the bit, the losses of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import residua
from tests.scale.common import ROOT, environment, ranks

pytestmark = [pytest.mark.slow, pytest.mark.engines]

ENGINES = Path(sys.prefix) / "engines"


@pytest.fixture(scope="module")
def told():
    surroundings = environment()
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ENGINES), surroundings["PYTHONPATH"]])
    done = subprocess.run(
        [*ranks(2), "tests.integrations.titan"],
        cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("design", residua.names())
def test_network_starts_and_trains_as_in_one_process(told, design):
    assert told[design]["start"], "a parameter does not start with the bits of one process"
    assert told[design]["sharded"] == pytest.approx(told[design]["alone"], abs=2e-5)


def test_what_it_cannot_do_is_one_error(told):
    assert "pipeline parallelism, torchtitan's compiler" in told["refused"]
    assert "\n" not in told["refused"]
