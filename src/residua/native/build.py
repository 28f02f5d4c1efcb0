"""The C files of this folder, compiled to one shared library: by the wheel's build, or on first use into the cache.

Only the standard library is imported here: the wheel's build runs this file where there is no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from residua.native.sealed import CURE, opened, seal
from residua.native.sealed import Unavailable as Unavailable

HERE = Path(__file__).parent
SHIPPED = "kernels.dylib" if sys.platform == "darwin" else "kernels.so"
"""The name of the binary inside a wheel, next to this file."""

FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=fast", "-fPIC", "-fvisibility=hidden", "-pthread")
"""No -march: variants.h names the instructions that are chosen at run time."""
OF_GCC = ("-fpeel-loops",)
"""Short loops of known length are unrolled, as by -O3, which takes half as long again to compile and wins nothing else:
the kernels are written in vectors. Clang does so by itself, and does not know the flag."""
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")


def sources() -> list[Path]:
    """The files that make the library, headers too."""
    return sorted([*HERE.glob("*.c"), *HERE.glob("*.h")])


def fingerprint() -> str:
    """A hash of the sources."""
    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """The command of the C compiler: `CC`, or the first of cc, gcc and clang."""
    asked = os.environ.get("CC")
    candidates = [shlex.split(asked)] if asked else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise Unavailable(f"no C compiler: {'CC=' + asked if asked else 'cc, gcc or clang'} is not on the PATH")


def version(command: list[str]) -> str:
    """What a compiler says it is."""
    line = [*command, "--version"]
    try:
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run: {error}") from None


def flags_of(compiler: str) -> tuple[str, ...]:
    """The flags for a compiler, by what it says it is."""
    return FLAGS if "clang" in compiler else FLAGS + OF_GCC


def compile_to(target: Path, command: list[str], flags: tuple[str, ...] = ()) -> None:
    """Compile the sources to `target`, which appears whole or not at all; files are compiled at once, on all cores."""
    mark, usual = f'-DRESIDUA_FINGERPRINT="{fingerprint()}"', flags_of(version(command))
    # beside the target: a rename is atomic only inside one file system
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        # the large first: a long one that begins last would be waited for alone
        files = sorted((file for file in sources() if file.suffix == ".c"), key=lambda file: -file.stat().st_size)
        objects = [str(Path(folder, file.stem + ".o")) for file in files]
        jobs = [
            [*command, *usual, *WARNINGS, mark, *flags, "-c", "-o", made, str(file)]
            for made, file in zip(objects, files, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, jobs))
        whole = Path(folder, "library")
        run([*command, *usual, *flags, "-shared", "-o", str(whole), *objects, "-lm"])
        seal(whole)
        whole.chmod(0o700)
        os.replace(whole, target)


def platform_tag(platform: str, library: bytes) -> str:
    """linux_x86_64 as the manylinux_2_N_x86_64 whose glibc has every symbol that a library names; others unchanged."""
    minors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max(minors)}_{platform[6:]}" if minors and platform.startswith("linux_") else platform


def run(line: list[str], folder: Path | None = None) -> None:
    """Run a compiler; `Unavailable` with its first error where it fails."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{line[0]} did not run: {error}") from None
    if done.returncode:
        errors = [text for text in done.stderr.splitlines() if "error" in text] or done.stderr.splitlines()
        raise Unavailable(f"{line[0]} failed: {errors[0] if errors else f'exit code {done.returncode}'}")


def build(flags: tuple[str, ...] = ()) -> Path:
    """The library in the user's cache, compiled now unless the same sources, compiler and flags already were."""
    command = compiler()
    folder = _private_folder()
    target = folder / f"{_key(command, flags)}{Path(SHIPPED).suffix}"
    if not _whole(target):
        with _locked(folder):
            if not _whole(target):
                print("residua: compiling its CPU kernels, once; this takes some seconds", file=sys.stderr, flush=True)
                compile_to(target, command, flags)
    with opened(target, private=True):
        return target


def _whole(target: Path) -> bool:
    """Whether a library is there as it was written; one that is damaged is made again, one of somebody else is not."""
    try:
        with opened(target, private=False):
            return True
    except Unavailable:
        return target.is_symlink()


def _key(command: list[str], flags: tuple[str, ...]) -> str:
    said = version(command)
    parts = [fingerprint(), *command, said, *flags_of(said), *flags, *os.uname()[::4]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _private_folder() -> Path:
    """A folder that only this user can write: whoever writes there runs code here."""
    from residua.cache import cache_root

    folder = cache_root() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Unavailable(f"{folder} can be written by others; {CURE}")
        folder.chmod(0o700)
    except OSError as error:
        raise Unavailable(f"the cache folder {folder} cannot be used: {error}") from None
    return folder


class _locked:
    """Holds the folder's lock: of several processes that start at once, one compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        import fcntl

        self.file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        os.close(self.file)
