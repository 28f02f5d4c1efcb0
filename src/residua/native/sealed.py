"""A library file that is loaded only as it was written, from a place where nobody else could have put another.

    sealed file = library | SHA-256 of the library, in hex | mark

What a linker writes ends where its tables end; bytes after that are nobody's, and there the digest stands. Opening
reads the file once through a descriptor and checks the digest, and the library is then loaded through the same
descriptor: between the check and the loading no rename can put another file in its place.

Only the standard library is imported here: the wheel's build runs this where there is no torch.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = b"residua-sealed-1\n"
LENGTH = 64 + len(MARK)
"""Bytes of a seal."""


class Unavailable(Exception):
    """There is no native library; the message is the reason."""


def seal(path: Path) -> None:
    """Write the digest of a file behind it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    with path.open("ab") as file:
        file.write(digest + MARK)


@contextmanager
def opened(path: Path, *, private: bool) -> Iterator[str]:
    """The name under which a sealed library can be loaded while the block lasts; `Unavailable` for any other file.

    private: the whole path must belong to this user or to the system, every folder of it, and be writable by no other.
    """
    try:
        handle = _open_private(path) if private else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"{path} cannot be opened: {error.strerror or error}") from None
    try:
        _check(path, handle)
        by_handle = f"/proc/self/fd/{handle}"
        yield by_handle if os.path.exists(by_handle) else str(path)
    finally:
        os.close(handle)


def _check(path: Path, handle: int) -> None:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise Unavailable(f"{path} is not a file")
    with os.fdopen(os.dup(handle), "rb") as file:
        data = file.read()
    body, written = data[:-LENGTH], data[-LENGTH:]
    if not written.endswith(MARK):
        raise Unavailable(f"{path} is no library of residua, or was cut short: it carries no digest")
    if hashlib.sha256(body).hexdigest().encode() != written[:64]:
        raise Unavailable(f"{path} is damaged: its digest does not match; remove it")


def _open_private(path: Path) -> int:
    """Open a file folder by folder from the root, each through the one before and none by a symbolic link."""
    above = path.parent.resolve()  # a link on the way, such as to a home folder, is followed once, here
    folder = os.open(above.anchor, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    walked = Path(above.anchor)
    try:
        _refuse_foreign(walked, os.fstat(folder))
        for part in above.parts[1:]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder, walked = inner, walked / part
            _refuse_foreign(walked, os.fstat(folder))
        if stat.S_ISLNK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise Unavailable(f"{path} is a symbolic link; {CURE}")
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _refuse_foreign(path, os.fstat(handle), own=True)
    except Unavailable:
        os.close(handle)
        raise
    return handle


CURE = "remove it, or set RESIDUA_CACHE to a folder of your own"


def _refuse_foreign(path: Path, found: os.stat_result, *, own: bool = False) -> None:
    """A file or folder of another user, or that others may write, could hold anything.

    The system's folders are taken; so are those where everybody may write but only the owner of an entry may rename it,
    as in /tmp. The owner of / can do everything in any case, whatever number it has inside a container.
    """
    trusted = {os.geteuid()} if own else {os.geteuid(), 0, os.stat("/").st_uid}
    shared = found.st_mode & 0o022 and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
    if found.st_uid not in trusted or shared:
        raise Unavailable(f"{path} can be written by others; {CURE}")
