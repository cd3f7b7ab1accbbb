"""The little that is read of a shared library without loading it: its sections, its build id, what it needs.

64-bit little-endian ELF only, which is all this library runs on. Pure standard library.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from .errors import BinaryFormatError

Data = bytes | mmap.mmap

_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_NOTE = struct.Struct("<III")
_NOBITS, _DT_NULL, _DT_NEEDED, _NT_GNU_BUILD_ID = 8, 0, 1, 3


def obstacle(path: str | PathLike[str]) -> str | None:
    """Why a file is not one to open: it is not there, or not a regular one, which may have no end; None if it is."""
    try:
        return None if stat.S_ISREG(os.stat(path).st_mode) else "not a regular file"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


@contextmanager
def mapped(path: str | PathLike[str]) -> Iterator[mmap.mmap]:
    """A file's bytes, mapped and not read; every error in the block names the file.

    Raises
    ------
    BinaryFormatError
        The file cannot be opened, is not a regular one, or is empty; or what the block raised.
    """
    if why := obstacle(path):
        raise BinaryFormatError(why, path=str(path))
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # it cannot be mapped
                raise BinaryFormatError("the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except OSError as error:
        raise BinaryFormatError(error.strerror or str(error), path=str(path)) from None
    except BinaryFormatError as error:
        raise BinaryFormatError(error.message, error.offset, path=str(path)) from None


def sections(data: Data, *names: str) -> list[tuple[int, int]]:
    """Where the sections of these names lie: (offset, size in bytes) of each, as often as there are such.

    Raises
    ------
    BinaryFormatError
    """
    if len(data) < 64 or data[:4] != b"\x7fELF":
        raise BinaryFormatError(f"not an ELF file, begins with {data[:4].hex() or 'nothing'}", 0)
    if data[4:6] != b"\x02\x01":
        raise BinaryFormatError(f"ELF class {data[4]} and byte order {data[5]}, only 2 and 1 are read", 4)
    table, entry_size, n, i_names = struct.unpack_from("<Q10xHHH", data, 40)
    if entry_size != _SECTION.size:
        raise BinaryFormatError(f"section headers of {entry_size} bytes, should be {_SECTION.size}", 58)
    if not 0 < i_names < n or table + n * entry_size > len(data):
        raise BinaryFormatError(
            f"{n} section headers at offset {table}, names in section {i_names}, in a file of {len(data)} bytes", 40
        )
    names_at, names_size = _place(data, table, i_names)
    # The wanted names are compared in place: a damaged table of names may have no end.
    wanted = [name.encode() + b"\0" for name in names]
    found = []
    for i in range(n):
        (name,) = struct.unpack_from("<I", data, table + i * entry_size)
        start = names_at + name
        if any(data[start : min(start + len(each), names_at + names_size)] == each for each in wanted):
            found.append(_place(data, table, i))
    if sum(size for _, size in found) > len(data):
        raise BinaryFormatError(f"sections {', '.join(names)} overlap: together larger than the file", table)
    return found


def _place(data: Data, table: int, i: int) -> tuple[int, int]:
    header = table + i * _SECTION.size
    _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(data, header)
    if kind == _NOBITS or offset + size > len(data):
        raise BinaryFormatError(
            f"section {i} of type {kind} has {size} bytes at offset {offset}, the file {len(data)}", header
        )
    return offset, size


def build_id(data: Data) -> str | None:
    """The GNU build id in hexadecimal, or None where the linker wrote none.

    Raises
    ------
    BinaryFormatError
    """
    for offset, size in sections(data, ".note.gnu.build-id"):
        if size >= _NOTE.size + 4:
            n_name, n_id, kind = _NOTE.unpack_from(data, offset)
            start = offset + _NOTE.size + n_name
            if kind == _NT_GNU_BUILD_ID and n_name == 4 and start + n_id <= offset + size:
                return data[start : start + n_id].hex()
        raise BinaryFormatError(f"the build id's note of {size} bytes is damaged", offset)
    return None


def needed(data: Data) -> list[str]:
    """The libraries it has to have (`DT_NEEDED`), by soname.

    Raises
    ------
    BinaryFormatError
    """
    found = []
    for (names_at, names_size), (offset, size) in zip(
        sections(data, ".dynstr"), sections(data, ".dynamic"), strict=False
    ):
        for tag, value in _DYNAMIC.iter_unpack(data[offset : offset + size - size % _DYNAMIC.size]):
            if tag == _DT_NULL:
                break
            if tag == _DT_NEEDED:
                name, end, _ = data[names_at + value : min(names_at + value + 256, names_at + names_size)].partition(
                    b"\0"
                )
                if not end or not name.isascii() or not name.decode().isprintable():
                    raise BinaryFormatError(
                        f"the needed library's name at offset {value} of .dynstr is damaged", offset
                    )
                found.append(name.decode())
    return found
