"""`residua bench all`: the tests once, then file after file; and which kernels serve a design."""

import subprocess
import sys

import pytest

from residua.cli import main
from residua.lab.bench import everything, record
from residua.lab.bench.served import served

ROW = {"regime": {"sources": record.sources()}, "profile": {"forms": []}}


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process, its measurements and its tests replaced by what they would give."""
    calls = {"tested": [], "measured": []}

    def check(subjects):
        calls["tested"].append(subjects)
        return {subject: [f"tests/ops/test_{subject}.py"] for subject in subjects}

    def process(arguments):
        calls["measured"].append(arguments)
        return None if arguments[0] == "stack" else ROW

    monkeypatch.setattr(record, "check", check)
    monkeypatch.setattr(everything, "_process", process)
    monkeypatch.setattr(everything, "FILES", {name: everything.FILES[name] for name in ("stack", "profile")})

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["residua", "bench", "all", *arguments])
        monkeypatch.setattr("residua.lab.bench.table.sheets", lambda measured: [])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr(), calls

    return command


def test_files_are_written_behind_one_run_of_the_tests(run, tmp_path):
    code, _, error, calls = run("--out", str(tmp_path))
    assert code == 1  # one failed, and the next was measured
    assert "not measured: stack" in error
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    found = record.read(tmp_path / "profile.json")
    assert found["command"] == f"residua bench profile --out {tmp_path / 'profile.json'}"
    assert found["tests"] == ["tests/ops/test_attend.py"]
    assert len(calls["tested"]) == 1
    assert {subject for of in everything.SUBJECTS.values() for subject in of} == set(calls["tested"][0])


def test_resume_keeps_what_these_sources_gave(run, tmp_path, monkeypatch):
    run("--out", str(tmp_path))
    *_, calls = run("--out", str(tmp_path), "--resume")
    assert [one[0] for one in calls["measured"]] == ["stack", "profile", "stack"]
    monkeypatch.setattr(record, "sources", lambda: "others")
    *_, calls = run("--out", str(tmp_path), "--resume")
    assert [one[0] for one in calls["measured"]][3:] == ["stack", "profile"]


def test_sources_that_change_end_it(run, tmp_path, monkeypatch):
    answers = iter(["before", "after"])
    monkeypatch.setattr(record, "sources", lambda: next(answers))
    code, _, error, _ = run("--out", str(tmp_path))
    assert code == 2
    assert "the sources have changed" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "code", "found"),
    [('{"a": 1}\n', 0, {"a": 1}), ('a library\n{\n"a": 1}\nends', 0, {"a": 1}), ("", 0, None), ('{"a": 1}', 2, None)],
)
def test_a_measuring_process_answers_in_json(said, code, found, monkeypatch):
    monkeypatch.setattr(everything, "_residua", lambda *given: subprocess.CompletedProcess(given, code, stdout=said))
    assert everything._process(("profile",)) == found


def test_compiling_needs_no_quiet_machine(run, monkeypatch):
    seen = []

    def residua(*arguments):
        seen.append(arguments)
        return subprocess.CompletedProcess(arguments, int(arguments[0] == "compiled"))

    monkeypatch.setattr(everything, "FILES", {name: (name,) for name in ("stack", "ops", "compiled")})
    monkeypatch.setattr(everything, "_residua", residua)
    code, _, error, calls = run("--compile-only")
    assert code == 1
    assert seen == [("ops", "--compile-only"), ("compiled", "--compile-only")]
    assert "not measured: compiled" in error
    assert calls == {"tested": [], "measured": []}


def test_hash_of_the_sources_is_of_every_file(tmp_path):
    (tmp_path / "native").mkdir()
    for name in ("a.py", "native/b.c", "native/notes.txt"):
        (tmp_path / name).write_text("one")
    before = record.sources(tmp_path)
    (tmp_path / "native" / "notes.txt").write_text("two")
    assert record.sources(tmp_path) == before
    (tmp_path / "native" / "b.c").write_text("two")
    assert record.sources(tmp_path) != before


def test_every_file_has_tests_to_pass(monkeypatch):
    for name, (kind, *_) in everything.FILES.items():
        measured = {kind: {"rows": [{"op": "attend"}]}} if kind == "ops" else {kind: {}}
        assert everything.subjects(measured), name


@pytest.mark.parametrize(
    ("design", "kernels", "references"),
    [("delta", ["attend"], []), ("depthswa", [], ["attend_qkv"]), ("lambdas", [], [])],
)
def test_fast_paths_are_found_by_running_them(design, kernels, references):
    assert served(design) == {"kernels": kernels, "references": references}
