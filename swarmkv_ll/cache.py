"""Where this library keeps files between runs, and how it writes any file: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .errors import DiskFullError, InvalidArgumentError

_STEP = 8 << 20
"""Most bytes that one call writes, so that a Ctrl-C does not wait for gigabytes."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writable(Protocol):
    """What is written to: a file, a pipe, a socket's `makefile("wb")`, a `BytesIO`."""

    def write(self, buffer: memoryview, /) -> int | None:
        """Take bytes from the front of `buffer`, which is valid during the call only; tell how many."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/swarmkv-ll`, by default `~/.cache/swarmkv-ll`; not made here."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "swarmkv-ll"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, in a folder that is made if there is none. Raises as `atomic_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, len(data)) as file:
        write_all(file, data)


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> io.BufferedReader:
    """Open a file to read it; unbuffered, as `open` with that argument. A pipe would be waited for.

    Raises
    ------
    OSError
        It is not a regular file, or the system's own reason.
    InvalidArgumentError
        No file can have this name.
    """
    name = file_name(path)
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open() refuses folders
        raise OSError(errno.EINVAL, "Not a regular file", name)
    return open(name, "rb", buffering=buffering)  # type: ignore[return-value]  # a FileIO, unbuffered


def file_name(path: str | os.PathLike[str]) -> str:
    """`path` as text; refuses what no file can be called.

    Raises
    ------
    InvalidArgumentError
    """
    name = os.fsdecode(path)
    try:
        if b"\0" in os.fsencode(name):
            raise ValueError("a NUL is in it")
    except ValueError as error:  # or half a surrogate
        raise InvalidArgumentError(f"{name!a} cannot be a file name: {error}") from None
    return name


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], n_bytes: int | None = None) -> Iterator[io.FileIO]:
    """Write a file that takes its name only when it is whole and on the disk.

    The body writes into a temporary file in the same folder, `.swarmkv-` + 32 hex digits + `.tmp`. When the body ends
    well, that is flushed to the disk, put in place of `path` by one rename, and the folder flushed. Otherwise it is
    removed. So whoever opens `path` finds the old file or the new one, whole, whatever moment this process or the
    machine is stopped at; a process that is killed (not one that is interrupted) leaves its temporary file behind. Of
    several that write one name at the same time, the last to finish wins.

    A symbolic link stays: what it points to is replaced. A file that is replaced passes on its permission bits, a new
    one gets those that the umask leaves; owner, access lists and other hard links are not passed on.

    Parameters
    ----------
    path : str or path
        In a folder that exists.
    n_bytes : int, optional
        How many bytes are going to be written, to be told if there is no room for them.

    Yields
    ------
    io.FileIO
        The temporary file, unbuffered (`write_all` writes all of something to it). Its `name` is the temporary's
        path, for writers that take nothing else; they must write to that file, not put another in its place.

    Raises
    ------
    DiskFullError
        No room for it; nothing was changed. (Also if the body itself runs out of room elsewhere.)
    IsADirectoryError
        `path` is a folder.
    OSError
        It is another thing that is not a file, or the system's own reason; nothing was changed.
    """
    target, mode = target_of(path)
    temporary = target.with_name(f".swarmkv-{secrets.token_hex(16)}.tmp")

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    with room_for(n_bytes, os.fspath(path)):
        try:
            with open(temporary, "xb", buffering=0, opener=create) as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                yield file
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename == str(temporary):
                error.filename = os.fspath(path)  # the name that the caller knows
            raise
        _flush_folder(target.parent)


def target_of(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The file that `path` leads to, and its permission bits if there is one.

    Raises
    ------
    IsADirectoryError, OSError
        It is a folder, or another thing that is not a file.
    """
    target = Path(os.path.realpath(file_name(path)))
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):  # a device or pipe would be replaced by a file
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return target, stat.S_IMODE(mode) & 0o777


def _flush_folder(folder: Path) -> None:
    """Have the system put the folder's entries on the disk."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder one may write in but not list: its entries get there in the system's own time
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def room_for(n_bytes: int | None, path: str | None = None) -> Iterator[None]:
    """Turn the system's errors for "no room" into a `DiskFullError`; `path` is the file that is written, if it is one."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        available = None
        if path is not None and error.errno == errno.ENOSPC:  # a quota or limit is not what the file system tells
            found = os.statvfs(Path(os.path.realpath(path)).parent)
            available = found.f_bavail * found.f_frsize
        raise DiskFullError(error.errno, n_bytes, available, path) from error


def write_all(file: Writable, data: bytes | memoryview) -> None:
    """Write all of `data` (bytes), in as many calls as `file` needs.

    Raises
    ------
    BlockingIOError
        `file` is non-blocking and takes no more now (`write` gave None); part of it may be written.
    OSError
        `file` says that it took no byte, or more than it was given; or the system's own reason.
    """
    with memoryview(data) as view:
        at, end = 0, len(view)
        while at < end:
            n_bytes = min(_STEP, end - at)
            with view[at : at + n_bytes] as piece:  # released, so that a traceback's frames keep no live view
                taken = file.write(piece)
            if taken is None:
                raise BlockingIOError(
                    errno.EAGAIN, f"write() of {n_bytes:,} bytes gave None: a non-blocking stream?", at
                )
            if not 0 < taken <= n_bytes:
                raise OSError(errno.EIO, f"write() of {n_bytes:,} bytes says that it took {taken:,}")
            at += taken
