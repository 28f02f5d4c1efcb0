"""The library is compiled once, privately, atomically and for any processor; where it cannot be, the reason is said."""

import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from residua.native import build, library, sealed

ROOT = build.HERE.parents[1]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with the two smallest C files, and a cache of its own: compiled in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("dispatch.c", "parallel.c", "kernels.h"):
        shutil.copy(build.HERE / name, folder)
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def counting(folder, monkeypatch):
    """A compiler that notes each of its runs; returns how to count them."""
    log, script = folder / "log", folder / "counting-cc"
    script.write_text(f'#!/bin/sh\necho run >> "{log}"\nexec cc "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def change(file):
    file.write_text(file.read_text() + "/* changed */\n")


def python(code, **environment):
    """Run Python outside the tree, with this package on its path; returns what it printed."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=300, check=False, cwd="/",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_build_is_private_and_done_once(small, monkeypatch):
    runs = counting(small, monkeypatch)
    first = build.build()
    assert first.parent == small / "cache" / "native"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert first.stat().st_mode & 0o077 == 0
    before = runs()
    assert build.build() == first
    assert runs() == before + 1  # it is asked for its version, which is part of the key
    assert [file.name for file in first.parent.iterdir() if file.name.startswith("building")] == []


def test_build_is_keyed_by_sources_compiler_and_flags(small, monkeypatch):
    first = build.build()
    flagged = build.build(("-DSOMETHING",))
    change(build.HERE / "dispatch.c")
    changed = build.build()
    counting(small, monkeypatch)
    assert len({first, flagged, changed, build.build()}) == 4


def test_build_by_two_at_once_compiles_once(small, monkeypatch):
    runs = counting(small, monkeypatch)
    alone = build.build()
    once = runs()
    alone.unlink()
    found = []
    workers = [threading.Thread(target=lambda: found.append(build.build())) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [alone] * 3
    assert runs() == once + once + 2  # two more askers for the version


@pytest.mark.parametrize("spoil", ["folder", "file", "link", "owner"])
def test_build_refuses_what_others_can_write(small, monkeypatch, spoil):
    made = build.build()
    if spoil == "folder":
        made.parent.chmod(0o777)
    elif spoil == "file":
        made.chmod(0o666)
    elif spoil == "link":
        made.rename(made.with_suffix(".other"))
        made.symlink_to(made.with_suffix(".other"))
    else:
        monkeypatch.setattr(build.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(build.Unavailable, match="RESIDUA_CACHE to a folder of your own"):
        build.build()


def test_build_that_fails_names_the_error_and_leaves_nothing(small):
    (build.HERE / "dispatch.c").write_text("int f(void) { return undeclared; }\n")
    with pytest.raises(build.Unavailable, match="undeclared"):
        build.build()
    assert [file.name for file in (small / "cache" / "native").iterdir()] == ["lock"]


def test_build_without_a_compiler_says_so(small, monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(build.Unavailable, match="CC=/no/such/compiler is not on the PATH"):
        build.build()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(small))
    with pytest.raises(build.Unavailable, match="cc, gcc or clang is not on the PATH"):
        build.build()


def test_build_in_a_cache_that_cannot_be_made_says_so(small, monkeypatch):
    (small / "file").touch()
    monkeypatch.setenv("RESIDUA_CACHE", str(small / "file"))
    with pytest.raises(build.Unavailable, match="cannot be used"):
        build.build()


def test_library_of_other_sources_is_refused(small):
    stale = build.build()
    change(build.HERE / "dispatch.c")
    with pytest.raises(build.Unavailable, match="other sources"):
        library._linked(stale)


def test_build_names_no_instructions_of_this_machine():
    assert not [flag for flag in build.FLAGS if flag.startswith("-m")]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the registers of x86")
def test_library_uses_wide_registers_only_where_they_are_chosen_at_run_time():
    """Every function that touches a register of 256 or 512 bits is a variant for such, and there are both."""
    binary = library.status()["binary"]
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", binary], capture_output=True, text=True, check=True)
    function, wide, wider = "", set(), set()
    for line in text.stdout.splitlines():
        heading = re.match(r"[0-9a-f]+ <(.+)>:", line)
        if heading:
            function = heading[1]
        elif "%zmm" in line:
            wider.add(function)
        elif "%ymm" in line:
            wide.add(function)
    assert any("mix_rows_f32_avx2" in name for name in wide)
    assert any("mix_rows_f32_avx512" in name for name in wider)
    assert not [name for name in wide if "_avx" not in name]
    assert not [name for name in wider if "_avx512" not in name]


@pytest.mark.slow
def test_library_without_x86_is_what_other_processors_get(tmp_path):
    """Compiled as for arm64, without a line for x86, it loads and its symbols are the same."""
    target = tmp_path / "portable.so"
    build.compile_to(target, build.compiler(), ("-DRESIDUA_NO_X86", "-Werror"))
    python(
        f"""
        import torch
        from residua import ops
        from residua.native import status
        assert status() == {{"binary": {str(target)!r}, "instructions": "portable", "reason": None}}, status()
        x = torch.randn(2, 3, 19)
        with ops.backend("cpu", strict=True):
            assert torch.allclose(ops.mix(torch.ones(2), (x, x)), 2 * x)
        """,
        RESIDUA_NATIVE=str(target),
    )


@pytest.mark.slow
def test_library_turned_off_leaves_every_op_right_with_one_warning():
    python(
        """
        import warnings
        import torch
        from residua import ops
        from residua.native import status
        assert status()["reason"] == "turned off by RESIDUA_NATIVE=0"
        x = torch.randn(2, 3, 8)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.allclose(ops.mix(torch.ones(2), (x, x)), 2 * x)
        assert len(said) == 1 and "RESIDUA_NATIVE=0" in str(said[0].message), [str(one.message) for one in said]
        with ops.backend("auto", strict=True):
            try:
                ops.mix(torch.ones(2), (x, x))
            except RuntimeError as error:
                assert "RESIDUA_NATIVE=0" in str(error)
            else:
                raise SystemExit("strict mode let a fallback pass")
        """,
        RESIDUA_NATIVE="0", RESIDUA_STRICT="0",
    )  # fmt: skip


def test_import_neither_compiles_nor_loads_the_library(tmp_path):
    python("import residua, residua.ops", RESIDUA_CACHE=str(tmp_path), CC="/no/such/compiler")
    assert not list(tmp_path.iterdir())


def test_instructions_are_named_or_refused(monkeypatch):
    chosen = library.status()["instructions"]
    *_, most = library.runnable()
    assert chosen == {"avx512": "avx2+avx512"}.get(most, most)  # the rule of dispatch.c
    with pytest.raises(ValueError, match="choose portable, avx2, avx512"), library.instructions("sse9"):
        pass
    with library.instructions("portable"):
        assert library.status()["instructions"] == "portable"
    assert library.status()["instructions"] == chosen
    monkeypatch.setattr(library, "runnable", lambda found=None: ("portable",))
    monkeypatch.setattr(library, "INSTRUCTIONS", (*library.INSTRUCTIONS, "avx9000"))
    with pytest.raises(ValueError, match="this processor runs portable"), library.instructions("avx9000"):
        pass


def cut(data):
    return data[: len(data) // 2]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


@pytest.mark.parametrize("harm", [cut, flipped, lambda data: b"", lambda data: data[:-1]])
def test_damaged_library_is_not_loaded_and_the_cached_one_is_made_again(small, harm, capfd):
    made = build.build()
    assert "compiling its CPU kernels" in capfd.readouterr().err
    whole = made.read_bytes()
    made.write_bytes(harm(whole))
    with pytest.raises(build.Unavailable, match=r"no digest|digest does not match"):
        library._linked(made)
    assert build.build() == made
    library._linked(made, private=True)
    assert "compiling" in capfd.readouterr().err
    assert build.build() == made
    assert capfd.readouterr().err == ""  # the second time there is nothing to say


def test_library_of_somebody_else_is_refused_by_its_name(small):
    import _ctypes

    with pytest.raises(build.Unavailable, match="no library of residua"):
        library._linked(build.Path(_ctypes.__file__))
    with pytest.raises(build.Unavailable, match="No such file"):
        library._linked(small / "nothing.so")
    with pytest.raises(build.Unavailable, match="is not a file"):
        library._linked(small)


@pytest.mark.parametrize("place", ["parent", "above"])
def test_folder_of_others_on_the_way_is_refused(small, place):
    """Whoever may rename a folder on the path could put another in its place."""
    made = build.build()
    folder = made.parent.parent if place == "parent" else small
    folder.chmod(0o777)
    try:
        with pytest.raises(build.Unavailable, match=f"{folder} can be written by others"):
            build.build()
        folder.chmod(0o1777)  # there only the owner of an entry may rename it, as in /tmp
        assert build.build() == made
    finally:
        folder.chmod(0o700)


def test_library_is_loaded_from_the_file_that_was_checked(small):
    """A file that takes the name of the checked one in between is not what is loaded."""
    made = build.build()
    with build.opened(made, private=True) as name:
        other = made.with_suffix(".other")
        other.write_bytes(b"another library")
        other.replace(made)
        assert build.Path(name).read_bytes().endswith(sealed.MARK)
