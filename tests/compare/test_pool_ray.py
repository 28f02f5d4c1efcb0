"""`--on ray` on a cluster of two processors: a worker killed, the command killed, Ctrl-C; the table of a local run."""

import secrets
import subprocess
import sys

import pytest

from tests.compare import pools

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CLUSTER = """
import sys, ray
here = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
print(here.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return pools.make_place(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module", autouse=True)
def _token():
    """A token for this cluster and its commands alone: none that lies on the machine is used, and none is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def address(_token):
    """A cluster that outlives the commands; it ends with its process, and that with this one."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(timeout=60)


def test_table_is_the_local_one_whatever_happens(place, address):
    code, expected, error = pools.finish(pools.start(place, "whole", "--jobs", "2"))
    assert code == 0, error

    on = "--on", f"ray:address={address}"
    command = pools.start(place, "out", *on)
    pools.kill_one(command, place, "out")
    pools.at_work(command, place, "out", updates=60)
    command.kill()
    pools.finish(command)
    pools.wait_for(lambda: pools.at_rest(place, "out"))

    command = pools.start(place, "out", *on)
    worker, folder = pools.at_work(command, place, "out", updates=10)
    pools.press_ctrl_c(command, worker)
    code, _, error = pools.finish(command)
    assert code == 130, error
    assert "every run is saved" in error
    assert pools.said(place, "out", folder, "stopped by SIGINT")

    code, results, error = pools.finish(pools.start(place, "out", *on))
    assert code == 0, error
    assert pools.timeless(results) == pools.timeless(expected)


def test_cluster_that_is_not_there_is_one_line(place):
    code, _, error = pools.finish(pools.start(place, "none", "--on", "ray:address=127.0.0.1:1"))
    assert code == 2
    assert "no Ray cluster at 127.0.0.1:1" in error
    assert error.strip().splitlines()[-1].startswith("residua: --on ray")
    assert "Traceback" not in error
