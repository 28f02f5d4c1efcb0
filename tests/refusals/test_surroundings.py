"""Users without a home, no standard input, folders that cannot be read, Ctrl-C: one line and no traceback."""

import os
import signal
import sys

import pytest

from residua.cache import cache_root
from residua.lab.data import DataError
from residua.lab.data import files as corpora
from residua.lab.train import Interrupted
from tests.refusals.harness import check_refused, residua


def test_user_without_a_home_has_a_cache_of_their_own(monkeypatch):
    for name in ("RESIDUA_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    import pwd

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert cache_root().name == f"residua-{os.getuid()}"


def test_tilde_in_the_cache_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RESIDUA_CACHE", "~")
    assert cache_root() == tmp_path


@pytest.mark.parametrize(("value", "shown"), [("0", False), ("", False), ("1", True)])
def test_traceback_is_shown_when_it_is_asked_for(monkeypatch, value, shown):
    monkeypatch.setenv("RESIDUA_TRACEBACK", value)
    if shown:
        with pytest.raises(ValueError, match="unknown design"):
            residua("designs", "nosuch")
    else:
        check_refused(residua("designs", "nosuch"), "unknown design 'nosuch'")


def test_advice_without_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    said = residua("advise", "--size", "demo", "--context", "64")
    assert said.code == 0, said.err
    assert "Defaults used" in said.out


def test_folder_that_cannot_be_read_is_no_smaller_corpus(monkeypatch, tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scan = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(DataError, match="closed cannot be read"):
        corpora.directory(str(tmp_path))


def test_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(tmp_path), "read_bytes", closed)
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        list(corpora.documents({"a.txt": tmp_path / "a.txt"}, corpora.Tally()))


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_control_c_before_the_command_is_an_exit_code(monkeypatch, capsys):
    from residua import __main__ as start

    monkeypatch.setattr("residua.cli.main", interrupt)
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "residua: interrupted\n"


def test_control_c_in_a_command_is_an_exit_code(monkeypatch):
    monkeypatch.setattr("residua.cli.designs.describe", interrupt)
    said = residua("designs", "delta")
    assert said.code == 130
    assert "Traceback" not in said.err


def test_control_c_while_duality_trains_is_one_line(monkeypatch):
    def stopped(**_):
        raise Interrupted(signal.SIGINT, 3, 60, "somewhere")

    monkeypatch.setattr("residua.lab.duality.trained_subjects", stopped)
    monkeypatch.setattr("residua.lab.duality.random_subject", lambda seed: None)
    said = residua("duality", "--corpus", "pydoc")
    assert said.code == 130
    assert said.err == "residua: interrupted by SIGINT; the models were being trained, and nothing is kept\n"
