"""Any pool: who is started again, who is not, what is told, and how everything is asked to end."""

import importlib.util
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from residua.lab.common.files import json_digest
from residua.lab.compare import ComparePlan, compare
from residua.lab.compare import execute as executing
from residua.lab.compare.execute import RunFailed, execute
from residua.lab.compare.pool import Local, Pool, make_pool
from residua.lab.compare.remote import Remote
from residua.lab.compare.work import DONE, FAILED, STOPPED, Work

PLAN = ComparePlan.from_json(
    {"designs": ["standard"], "seeds": [0, 1], "sizes": [{"depth": 1, "width": 8, "heads": 1}],
     "train": {"steps": 4, "context": 8}}
)  # fmt: skip


class Fake(Pool):
    """Ends every run at once, the way that the next of `ways` says: done, an ending, killed, or never."""

    pause = 0.0

    def __init__(self, *ways):
        self.ways, self.started, self.stopped, self.killed = list(ways), [], [], []

    def start(self, work):
        pool, way = self, self.ways.pop(0) if self.ways else "done"
        self.started.append(work.folder.name)
        work.folder.mkdir(parents=True, exist_ok=True)
        if way == "done":
            digest = json_digest(json.loads(work.job.read_text()))[:16]
            shutil.copy(work.job, work.folder / "config.json")
            (work.folder / "result.json").write_text(json.dumps({"loss": 1.0, "bits_per_byte": 1.0, "config": digest}))
            (work.folder / "routing.json").write_text("{}")
            work.end(DONE, "")
        elif isinstance(way, tuple):
            work.end(*way)

        class Started:
            def running(self):
                return way == "never" and work not in pool.killed

            def stop(self):
                pool.stopped.append(work)

            def kill(self):
                pool.killed.append(work)

        return Started()


def run(pool, out, **more):
    told = []
    try:
        execute(PLAN.runs({}), out, pool=pool, jobs=None, threads=1, listen=told.append, **more)
    finally:
        run.told = [(event["kind"], event.get("run", "").rpartition("/")[2]) for event in told]
    return run.told


def test_runs_that_end_well_are_told_once(tmp_path):
    assert run(Fake(), tmp_path) == [
        ("phase", ""), ("started", "seed0"), ("finished", "seed0"), ("started", "seed1"), ("finished", "seed1"),
    ]  # fmt: skip
    again = Fake()
    assert run(again, tmp_path) == [("phase", "")]
    assert again.started == []


def test_lost_process_is_started_again(tmp_path):
    """Killed, or stopped by somebody else: its machine was wanted."""
    pool = Fake("killed", (STOPPED, "stopped by SIGTERM"))
    told = run(pool, tmp_path)
    assert pool.started == ["seed0", "seed1", "seed0", "seed1"]
    assert told.count(("lost", "seed0")) == told.count(("lost", "seed1")) == 1
    assert told.count(("finished", "seed0")) == told.count(("finished", "seed1")) == 1


def test_run_that_is_lost_too_often_fails(tmp_path):
    pool = Fake(*["killed"] * 20)
    with pytest.raises(RunFailed, match="its process was killed"):
        run(pool, tmp_path)
    assert pool.started.count("seed0") == 1 + pool.restarts


def test_killed_run_is_not_blamed_on_what_an_earlier_process_printed(tmp_path):
    """The log goes on over every start of a run: what stands there from before is no reason."""

    class Printing(Fake):
        def __init__(self, *lines):
            super().__init__(*["killed"] * len(lines))
            self.lines, self.restarts = list(lines), len(lines) - 1

        def start(self, work):
            with work.log.open("a") as log:
                log.write(self.lines.pop(0))
            return super().start(work)

    def said(*lines):
        told = []
        with pytest.raises(RunFailed) as failed:
            execute(PLAN.runs({})[:1], tmp_path, pool=Printing(*lines), jobs=None, threads=1, listen=told.append)
        reasons = [event["message"] for event in told if event["kind"] == "lost"]
        return [*reasons, str(failed.value).partition("failed: ")[2].partition(" (see")[0]]

    killed = "its process was killed"
    assert said("no memory\n", "") == [f"{killed}, and its log ends: no memory", killed]
    assert said("", "Bus error\n") == [killed, f"{killed}, and its log ends: Bus error"]


def test_error_is_not_tried_again_and_the_others_are_asked_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr(executing, "PATIENCE", 0.1)
    broken = (FAILED, "a trace\nValueError: no such corpus")
    pool = Fake(broken, "never", *[broken] * 9)
    with pytest.raises(RunFailed, match=r"seed0 failed: ValueError: no such corpus \(see .*seed0.log\)"):
        run(pool, tmp_path)
    assert pool.started == ["seed0", "seed1"]
    assert [work.folder.name for work in pool.stopped] == [work.folder.name for work in pool.killed] == ["seed1"]


def test_queued_run_is_told_when_it_has_begun(tmp_path):
    """A run in a queue has no bar; what it lost before its first line was never told either."""

    class Queue(Fake):
        def start(self, work):
            job = super().start(work)
            looks = iter([True, True, True, False])
            job.running = lambda: next(looks, False)
            (work.folder / "metrics.jsonl").write_text("")
            assert not any(kind == "started" for kind, _ in told)
            return job

    told = []
    pool = Queue()
    execute(
        PLAN.runs({})[:1], tmp_path, pool=pool, jobs=None, threads=1,
        listen=lambda event: told.append((event["kind"], event.get("run"))),
    )  # fmt: skip
    assert [kind for kind, _ in told] == ["phase", "started", "finished"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cloud", "--on is local, slurm, ray, not 'cloud'"),
        ("local:gpus=1", "has no 'gpus'; it takes no options"),
        ("slurm:queue=gpu", "has no 'queue'; it takes partition"),
        ("slurm:minutes=soon", "minutes is a whole number"),
        ("slurm:minutes=0", "minutes is a whole number"),
        ("slurm:gpus", "'gpus' is not key=value"),
        ("slurm:gpus=1,gpus=2", "gives 'gpus' twice"),
        ("slurm:cluster=moon", "cluster is slurm or local"),
        ("ray:cpus=-1", "cpus is a whole number"),
    ],
)
def test_wrong_pool_is_one_line_and_nothing_is_made(spec, said, tmp_path):
    with pytest.raises(ValueError) as error:
        compare(PLAN, tmp_path / "out", on=spec)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "module"), [("slurm", "submitit"), ("ray", "ray")])
def test_missing_extra_says_what_to_install(name, module, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *more: None if wanted == module else find(wanted))
    with pytest.raises(ValueError, match=rf"needs {module}: pip install 'residua\[cluster\]'"):
        make_pool(name, tmp_path)
    assert isinstance(make_pool("local", tmp_path), Local)


def test_slurm_needs_sbatch(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="no sbatch here"):
        make_pool("slurm:partition=gpu", tmp_path)


def test_machine_with_another_version_is_refused(tmp_path, monkeypatch):
    """Before anything is trained, in one line that names the machine and the versions."""
    monkeypatch.setattr(Remote, "_become", lambda self: None)
    work = Work(tmp_path / "run.json", tmp_path / "run")
    assert Remote(work, str(tmp_path), {}, {"residua": "0.0.1", "python": "3", "torch": "2"})() == FAILED
    code, message = work.ended()
    assert code == FAILED
    assert "(not 0.0.1)" in message
    assert "\n" not in message
    assert not Path(work.folder).exists()


def test_slurm_job_asks_for_what_a_run_needs(tmp_path, monkeypatch):
    """Programs of Slurm's names stand in for Slurm: sbatch gets resources and threads, scancel stops."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in (("sbatch", "echo Submitted batch job 17"), ("srun", ""), ("sacct", ""), ("scancel", "")):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n{does}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    out = tmp_path / "out"
    pool = make_pool("slurm:partition=big,account=us,minutes=720,memory_gb=8", out)
    (out / "jobs").mkdir(parents=True)
    job = pool.start(Work(out / "jobs/run.json", out / "run", threads=3, gpus=1))
    assert "OMP_NUM_THREADS" not in os.environ
    script = out / "jobs/submitit/17_submission.sh"
    asked = script.read_text()
    for line in ("--cpus-per-task=3", "--gpus-per-node=1", "--partition=big", "--account=us", "--time=720", "--mem=8GB",
                 "--signal=USR2@90"):  # fmt: skip
        assert f"#SBATCH {line}" in asked
    assert "export OMP_NUM_THREADS=3" in asked
    assert job.running()
    job.stop()
    assert "scancel 17" in (tmp_path / "asked").read_text()
    plain = make_pool("slurm", out)
    plain.start(Work(out / "jobs/run.json", out / "run"))
    assert "gpus" not in script.read_text()
    assert "--cpus-per-task=1" in script.read_text()


def test_finished_run_of_another_plan_is_refused_by_name(tmp_path):
    """Copied in, whole, with its result: the table would be of two plans."""
    run(Fake(), tmp_path)
    config = tmp_path / "runs" / "standard" / "seed1" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lr": 0.5}))
    with pytest.raises(ValueError, match=r"seed1 holds a run of another plan \(lr is 0\.5 there and 0\.002 here\)"):
        run(Fake(), tmp_path)


def test_result_of_another_config_is_refused_by_name(tmp_path):
    run(Fake(), tmp_path)
    result = tmp_path / "runs" / "standard" / "seed1" / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"config": "0" * 16}))
    with pytest.raises(ValueError, match=r"seed1/result\.json is the result of another configuration"):
        run(Fake(), tmp_path)
    result.with_name("config.json").unlink()
    with pytest.raises(ValueError, match=r"seed1 has a result and no config\.json"):
        run(Fake(), tmp_path)


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_process_that_is_over_leaves_no_pipe(tmp_path, monkeypatch, how):
    """Hundreds of runs from one command: each one's pipe is closed with it."""
    popen, program = subprocess.Popen, ["true"] if how == "ended" else ["sleep", "60"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(program, **options))
    started = Local().start(Work(tmp_path / "job.json", tmp_path / "run"))
    if how == "killed":
        assert started.running()
        started.kill()
    deadline = time.monotonic() + 60
    while started.running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started.process.stdin.closed
