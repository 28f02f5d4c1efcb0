"""The same C on another processor and from another compiler: calls that were made here are made again there."""

import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

from residua import ops
from residua.native import build, library
from residua.ops.norm import accumulator
from residua.ops.project import native
from tests.native.replay import Recording, program, recorded
from tests.native.table import OPS, gradients

pytestmark = pytest.mark.slow
STRICT = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror")


def exported():
    """The kernels that Python calls by name; not what chooses between their variants."""
    texts = [file.read_text() for file in build.sources() if file.suffix == ".c" and file.name != "dispatch.c"]
    return set(re.findall(r"^EXPORT int (residua_\w+)\(", "\n".join(texts), re.MULTILINE))


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Every op with a kernel, forward and backward, in every type; reads alone, in a group, and with their options."""
    with library.instructions("portable"), ops.backend("cpu", strict=True), recorded() as found:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for op in OPS:
                for size in ((2, 3, 5), (1, 2, 96)):
                    gradients(op, op.draw(*size, dtype=dtype, grad=True))
            for options in ({}, {"heads": 2}, {"total": True}, {"centered": True}):
                _read(dtype, 6, 22, **options)
            _decoding(dtype)
        _group()
    # its addresses lie in a table of its own, which a recording does not follow; its arithmetic is that of groups
    assert set(found.functions) == exported() - {"residua_attend_together"}
    return found


def _read(dtype, sources, width, **options):
    generator = torch.Generator().manual_seed(sources)
    query = torch.randn(width, generator=generator).requires_grad_()
    values = [torch.randn(2, 5, width, generator=generator).to(dtype).requires_grad_() for _ in range(sources)]
    ops.attend(
        query.to(dtype) if dtype == torch.float64 else query, tuple(values), eps=1e-6, **options
    ).sum().backward()


@torch.no_grad()
def _decoding(dtype):
    generator = torch.Generator().manual_seed(9)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, large = draw(1, 1, 22), draw(native.LEAST // 22 + 1, 22)
    ops.project(x, large)
    ops.gated_mlp(x, draw(11, 22), draw(11, 22), draw(5, 11))
    turns = (draw(1, 3).to(accumulator(dtype)), draw(1, 3).to(accumulator(dtype)))
    cache = draw(1, 2, 12, 6), draw(1, 2, 12, 6)
    ops.cached_attend(draw(1, 1, 24), draw(1, 1, 12), draw(1, 1, 12), turns, *cache, 9)
    ops.attention_step((x,), (draw(24, 22), draw(12, 22), draw(12, 22), draw(5, 24)), turns, *cache, 10)


def _group():
    from residua.ops.attend import cpu

    generator = torch.Generator().manual_seed(8)
    queries = torch.randn(5, 22, generator=generator).requires_grad_()
    values = [torch.randn(2, 5, 22, generator=generator).requires_grad_() for _ in range(7)]
    carries, same = cpu.ahead(queries, tuple(values[:4]), None, eps=1e-6)
    merged = [cpu.merge(carry, query, (*values[4:],), eps=1e-6) for carry, query in zip(carries, queries, strict=True)]
    # by random slopes: of a square, what is left for the log-sum is a rounded zero
    torch.autograd.backward(merged, [torch.randn(one.shape, generator=generator) for one in merged])
    assert same


def replay(folder, recording, compiler, *runner, extra=()):
    """Compile the kernels with a program that makes the recorded calls, and run it."""
    (folder / "replay.c").write_text(program(recording))
    (folder / "calls").write_bytes(recording.dump())
    kernels = [str(file) for file in build.sources() if file.suffix == ".c"]
    flags = (*build.flags_of(build.version([compiler])), *STRICT, *extra)
    line = [compiler, *flags, "-static", "-o", str(folder / "replay"), str(folder / "replay.c"), *kernels, "-lm"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return subprocess.run(
        [*runner, str(folder / "replay"), str(folder / "calls")],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.arm
def test_kernels_on_arm_make_the_same_numbers(tmp_path, recording):
    """Compiled for arm64 and run by an emulator of it."""
    found = replay(tmp_path, recording, "aarch64-linux-gnu-gcc", "qemu-aarch64")
    assert found.returncode == 0, found.stdout + found.stderr
    assert all(f"{name} " in found.stdout for name in recording.functions)
    header = subprocess.run(["file", tmp_path / "replay"], capture_output=True, text=True, check=False).stdout
    assert not header or "aarch64" in header


@pytest.mark.clang
def test_clang_builds_without_a_warning_and_makes_the_same_numbers(tmp_path, recording):
    found = replay(tmp_path, recording, "clang", extra=("-O1",))
    assert found.returncode == 0, found.stdout + found.stderr


def test_replay_finds_a_number_that_is_off(tmp_path, recording):
    """One changed byte of what is expected: the checks above could have failed."""
    call = bytearray(recording.calls[0])
    call[-2] ^= 0x40
    wrong = Recording(recording.functions, [bytes(call)])
    found = replay(tmp_path, wrong, shutil.which("cc") or "gcc", extra=("-O1", "-DRESIDUA_NO_X86"))
    assert found.returncode == 1, found.stdout + found.stderr
    assert " off" in found.stdout


@pytest.mark.parametrize(("platform", "name"), [("linux", "kernels.so"), ("darwin", "kernels.dylib")])
def test_build_is_one_that_any_unix_takes(platform, name, monkeypatch):
    """No option of one linker alone, no OpenMP, which Apple's compiler lacks, and the name that the system gives to
    libraries."""
    monkeypatch.setattr(sys, "platform", platform)
    there = runpy.run_path(build.__file__)
    assert there["SHIPPED"] == name
    assert not [flag for flag in (*there["FLAGS"], *there["OF_GCC"]) if flag.startswith("-Wl") or "openmp" in flag]
    assert not [file.name for file in build.sources() if re.search(r"omp\.h|#pragma omp", file.read_text())]
