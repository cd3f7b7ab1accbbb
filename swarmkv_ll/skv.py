"""`.skv` files: a state, small arrays and a JSON object, each with its checksum. docs/format.md has every byte.

Needs no engine. Writing never seeks and reading never looks ahead, so that files, pipes and sockets are all the same.
A reader knows from the header where everything must lie, and allocates nothing that it has not checked.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from .cache import Writable, atomic_file, open_regular, room_for, write_all
from .errors import EndOfStreamError, InvalidArgumentError, SnapshotFileError

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int], Bytes]

MAGIC = b"\x89SKV\r\n\x1a\n"
"""As PNG's: a high bit, a line end of each kind and a Ctrl-Z, so that a transfer as text shows."""

VERSION = 1

PAGE = 4096
"""The state begins at a multiple of this (bytes), and the file ends at one."""

ALIGNMENT = 64
"""The other sections begin at multiples of this (bytes)."""

MAX_SECTIONS = 65_535
MAX_META = 16 << 20
"""Bytes of JSON: as Python objects they take many times as much."""

MAX_BEFORE_STATE = 1 << 30
"""Most bytes before the state: what a stream can make its reader take without asking `allocate`."""

MAX_FILE = 2**63 - PAGE
"""Most bytes of a file: where file offsets end."""

_VERSION_AT, _FLAGS_AT, _LENGTH_AT, _SIZE_AT, _COUNT_AT = 8, 12, 16, 24, 32
_HEAD = struct.Struct("<8sIIQQQ")
_ENTRY = struct.Struct("<32s8sQQ16s")
_DIGEST = 16
_FIRST = 1 << 14
_CHUNK = 1 << 20  # read and hashed at a time, while it is in the cache: faster than smaller, larger or a second thread

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")
_META, _STATE = ("meta", "json"), ("state", "u1")
_DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_ITEM_BYTES = {dtype: int(dtype[1:]) for dtype in _DTYPES}

_Encoded = tuple[str, str, bytes]  # name, dtype, data


@dataclass(frozen=True)
class Contents:
    """What a snapshot file holds.

    Attributes
    ----------
    meta : dict
        Text keys; values as JSON has them: dict, list, str, int, finite float, bool, None.
    arrays : mapping of str to ndarray, each of shape (n,)
        Small arrays by name: 1 to 32 of the characters ``A-Z a-z 0-9 _ . -``, not beginning with ``.`` or ``-``, not
        ``meta`` or ``state``. int8 to int64, uint8 to uint64, float16 to float64.
    state : ndarray of uint8, shape (n_bytes,), contiguous
        Not copied when written.
    """

    meta: dict[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]
    state: Bytes


@dataclass(frozen=True)
class Section:
    """One entry of a file's table.

    Attributes
    ----------
    name : str
    dtype : str
        ``"json"``, or kind and bytes of numpy's type: ``"i4"``, ``"f4"``, ….
    offset, length : int
        Bytes, from the beginning of the file.
    checksum : bytes
        XXH3-128 of the section's bytes in its canonical form (16 bytes, big-endian).
    """

    name: str
    dtype: str
    offset: int
    length: int
    checksum: bytes

    @property
    def shape(self) -> tuple[int]:
        """Shape of the array; of the text in bytes for ``"json"``."""
        return (self.length // _ITEM_BYTES.get(self.dtype, 1),)


@dataclass(frozen=True)
class Header:
    """What `peek` tells of a file.

    Attributes
    ----------
    version : int
    meta : dict
    sections : tuple of Section
        In the file's order: ``meta``, the arrays, ``state``.
    n_bytes : int
        Size of the file.
    """

    version: int
    meta: dict[str, Any]
    sections: tuple[Section, ...]
    n_bytes: int

    @property
    def state_bytes(self) -> int:
        """Size of the state, in bytes."""
        return self.sections[-1].length


class Readable(Protocol):
    """What is read from, if it has no `readinto`."""

    def read(self, n_bytes: int, /) -> bytes | None:
        """At most `n_bytes` bytes; none of them at the end."""


class ReadableInto(Protocol):
    """What is read from: a file, a pipe, a socket's `makefile("rb")`, a `BytesIO`."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the front of `buffer`, which is valid during the call only; tell how many bytes, 0 at the end."""


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────


def size(contents: Contents) -> int:
    """Bytes that `dump` and `save` write.

    Raises
    ------
    InvalidArgumentError
        Contents that a file cannot hold.
    """
    _check_state(contents.state, "state")
    return _prepared(contents.meta, contents.arrays, len(contents.state))[1]


def dump(contents: Contents, file: Writable) -> int:
    """Write a snapshot to anything with `write`: file, pipe, `socket.makefile("wb")`, `BytesIO`.

    Written in order, without seeking. The state is read twice, as its checksum stands before it, and not copied; it
    must not change meanwhile. A `write` that takes only part is called again. A buffered `file` is not flushed.

    Returns
    -------
    int
        Bytes written, as many as `size` tells.

    Raises
    ------
    InvalidArgumentError
        Contents that a file cannot hold; nothing was written.
    DiskFullError
        No room; part of it was written.
    BlockingIOError
        `file` is non-blocking and takes no more; part of it was written.
    OSError
        The system's own reason; part of it was written.
    """
    try:
        _check_state(contents.state, "state")
        _check_stream(file, "write")
        small, n_bytes = _prepared(contents.meta, contents.arrays, len(contents.state))
        with contents.state.data as state, room_for(n_bytes):
            _write(small, state, n_bytes, file)
        return n_bytes
    finally:
        del contents  # what is raised refers to this frame, which should keep no view of the state alive


def save(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write a snapshot file, whole or not at all; it is on the disk when this returns.

    Until then `path` is as it was: `swarmkv_ll.cache.atomic_file` says how, and what becomes of links and permissions.
    The state is read twice and not copied; it must not change meanwhile.

    Raises
    ------
    InvalidArgumentError
        Contents that a file cannot hold.
    DiskFullError
        No room.
    OSError
        The system's own reason: IsADirectoryError, PermissionError and others.
    """
    try:
        _check_state(contents.state, "state")
        small, n_bytes = _prepared(contents.meta, contents.arrays, len(contents.state))
        with contents.state.data as state, atomic_file(path, n_bytes) as file:
            _write(small, state, n_bytes, file)
    finally:
        del contents  # as in `dump`


def _prepared(meta: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]], n_state: int) -> tuple[list[_Encoded], int]:
    """Every section but the state, encoded, and the file's size; refuses what a reader would refuse."""
    small = [_encode_meta(meta), *(_encode_array(name, array) for name, array in arrays.items())]
    offsets, n_bytes = _place([*(len(data) for *_, data in small), n_state])
    for what, actual, most in (
        ("sections", len(offsets), MAX_SECTIONS),
        ("bytes of meta", len(small[0][2]), MAX_META),
        ("bytes before its state", offsets[-1], MAX_BEFORE_STATE),
    ):
        if actual > most:
            raise InvalidArgumentError(f"a snapshot file has at most {most:,} {what}, not {actual:,}")
    return small, n_bytes


def _encode_meta(meta: dict[str, Any]) -> _Encoded:
    try:
        text = json.dumps(meta, allow_nan=False, separators=(",", ":")).encode("ascii")
        same = _parse_meta(text) == meta
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"meta is not what JSON can hold: {error}") from None
    if not same:
        raise InvalidArgumentError(
            "meta would be read back differently: it should have text keys, and lists, not tuples"
        )
    return *_META, text


def _encode_array(name: str, array: npt.NDArray[Any]) -> _Encoded:
    if not _is_array_name(name):
        raise InvalidArgumentError(
            f"{name!r} is no name for an array: 1 to 32 letters, digits, _ . - that are not taken"
        )
    code = f"{array.dtype.kind}{array.dtype.itemsize}"
    if array.ndim != 1 or code not in _DTYPES:
        raise InvalidArgumentError(
            f"array {name!r} should have one dimension and a type of {', '.join(_DTYPES)}; "
            f"it is {array.dtype} of shape {array.shape}"
        )
    return name, code, array.astype(f"<{code}", copy=False).tobytes()


def _write(small: Sequence[_Encoded], state: memoryview, n_bytes: int, file: Writable) -> None:
    sections: list[tuple[str, str, bytes | memoryview]] = [*small, (*_STATE, state)]
    offsets, _ = _place([len(data) for *_, data in sections])
    header = _HEAD.pack(MAGIC, VERSION, 0, _header_bytes(len(sections)), n_bytes, len(sections))
    header += b"".join(
        _ENTRY.pack(name.encode(), dtype.encode(), offset, len(data), _checksum(data))
        for offset, (name, dtype, data) in zip(offsets, sections, strict=True)
    )
    header += _checksum(header)
    at = 0
    for offset, data in [(0, header), *((o, s[2]) for o, s in zip(offsets, sections, strict=True)), (n_bytes, b"")]:
        write_all(file, bytes(offset - at))
        write_all(file, data)
        at = offset + len(data)


def _checksum(data: bytes | memoryview) -> bytes:
    hasher = xxh3_128()
    with memoryview(data) as view:
        for at in range(0, len(view), _CHUNK):
            with view[at : at + _CHUNK] as piece:
                hasher.update(piece)
    return hasher.digest()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def load(path: str | os.PathLike[str], allocate: Allocate) -> Contents:
    """Read a snapshot file, everything checked.

    Parameters
    ----------
    path : str or path
    allocate : callable
        ``allocate(n_bytes)`` gives the memory for the state: uint8, shape (n_bytes,), contiguous, writable. Called
        once, when the header agrees with itself and with the file's real size, and meta and arrays are read.

    Returns
    -------
    Contents
        `state` is the array that `allocate` gave; the arrays are writable copies.

    Raises
    ------
    SnapshotFileError
        Not a snapshot file, a version that this library does not read, cut short, or damaged. What `allocate` gave
        then holds anything; nothing refers to it any more, not even the exception's traceback.
    InvalidArgumentError
        `allocate` gave something else than it was asked for.
    OSError
        The system's own reason; also for what is not a regular file (`read` is for pipes).
    """
    with _opened(path) as source:
        return _read(source, allocate)


def read(file: Readable | ReadableInto, allocate: Allocate) -> Contents:
    """Read a snapshot from anything with `readinto` or `read`: file, pipe, `socket.makefile("rb")`, `BytesIO`.

    Read in order, not a byte beyond its end, so that several can follow each other in one stream. Memory for meta and
    arrays is taken as their bytes arrive, at most 1 GiB of it. Parameters and result are as for `load`; as a stream does
    not tell its length, it is for `allocate` to refuse a state that is too large.

    Raises
    ------
    EndOfStreamError
        The stream has ended; not a byte came.
    SnapshotFileError, InvalidArgumentError
        As for `load`. The stream then stands anywhere in the snapshot.
    BlockingIOError
        `file` is non-blocking and has nothing now.
    OSError
        The system's own reason.
    """
    _check_stream(file, "readinto", "read")
    return _read(_Source(file), allocate)


def peek(path: str | os.PathLike[str]) -> Header:
    """Read what stands before the arrays and the state: header and meta are checked, and the file's size.

    Raises
    ------
    SnapshotFileError, OSError
        As for `load`.
    """
    with _opened(path) as source:
        return _read_header(source)


class _Source:
    """Reads in order, counts, and says where it goes wrong."""

    def __init__(self, file: Readable | ReadableInto, path: str | None = None, n_bytes: int | None = None) -> None:
        self._file: Any = file
        self._has_readinto = hasattr(file, "readinto")
        self.path, self.n_bytes = path, n_bytes
        self.offset = 0

    def error(
        self, offset: int, field: str, expected: object, actual: object, hint: str | None = None
    ) -> SnapshotFileError:
        return SnapshotFileError(self.path, offset, field, expected, actual, hint)

    def fill(self, view: memoryview, field: str, hasher: xxh3_128, to_come: int = 0) -> None:
        """Read as many bytes as `view` has, through `hasher`; `to_come` bytes of the field are read later."""
        at, end = 0, len(view)
        while at < end:
            with view[at : at + _CHUNK] as piece:  # released, so that a traceback's frames keep no live view
                got = self._some(piece)
                with piece[:got] as fresh:
                    hasher.update(fresh)
            if got == 0:
                if self.offset == 0 and self.path is None:
                    raise EndOfStreamError(None, 0, "stream", "at another snapshot", "at its end")
                missing = end - at + to_come
                raise self.error(self.offset, field, f"{missing:,} bytes more", "the end", "cut short")
            at += got
            self.offset += got

    def _some(self, piece: memoryview) -> int:
        """Read into the front of `piece` by one call; 0 at the end."""
        n_bytes = len(piece)
        if self._has_readinto:
            got = self._file.readinto(piece)
        else:
            data = self._file.read(n_bytes)
            got = None if data is None else len(data)
            if data and len(data) <= n_bytes:
                piece[: len(data)] = data
        if got is None:
            raise BlockingIOError(errno.EAGAIN, "the stream is non-blocking and has nothing to read")
        if not 0 <= got <= n_bytes:
            raise OSError(errno.EIO, f"the stream gave {got:,} bytes, asked for {n_bytes:,}")
        return int(got)

    def take(self, n_bytes: int, field: str, hasher: xxh3_128 | None = None) -> bytearray:
        """Read `n_bytes`; allocates at most twice what has come, and `_FIRST`."""
        data, hasher = bytearray(), hasher or xxh3_128()
        while to_come := n_bytes - len(data):
            piece = bytearray(min(_CHUNK, to_come, max(_FIRST, len(data))))
            with memoryview(piece) as view:
                self.fill(view, field, hasher, to_come - len(view))
            data += piece
        return data

    def gap(self, until: int) -> None:
        """Read the zeros up to `until`."""
        begin = self.offset
        found = self.take(until - begin, "padding")
        at = len(found) - len(found.lstrip(b"\0"))
        if at < len(found):
            raise self.error(begin + at, "padding", 0, found[at])

    def section(self, section: Section) -> bytearray:
        """Read a section that is not the state, and the gap before it."""
        hasher = xxh3_128()
        self.gap(section.offset)
        data = self.take(section.length, section.name, hasher)
        self.verify(section, hasher)
        return data

    def verify(self, section: Section, hasher: xxh3_128) -> None:
        if hasher.digest() != section.checksum:
            raise self.error(
                section.offset, f"checksum of {section.name}", section.checksum.hex(), hasher.hexdigest(), "damaged"
            )


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[_Source]:
    with open_regular(path, buffering=0) as file:
        yield _Source(file, os.fsdecode(path), os.fstat(file.fileno()).st_size)


def _read(source: _Source, allocate: Allocate) -> Contents:
    header = _read_header(source)
    arrays = {
        section.name: np.frombuffer(source.section(section), f"<{section.dtype}") for section in header.sections[1:-1]
    }
    last, hasher = header.sections[-1], xxh3_128()
    source.gap(last.offset)
    state = allocate(last.length)
    try:
        _check_state(state, f"allocate({last.length})")
        if len(state) != last.length or not state.flags.writeable:
            raise InvalidArgumentError(f"allocate({last.length}) gave {len(state)} bytes, or bytes that are read-only")
        with state.data as view:
            source.fill(view, last.name, hasher)
        source.verify(last, hasher)
        source.gap(header.n_bytes)
    except BaseException:
        del state  # what is raised refers to this frame, which should keep no view of the state alive
        raise
    return Contents(header.meta, arrays, state)


_LOOKS_LIKE = {
    ord("q"): "; perhaps a sequence file of llama.cpp's, which Snapshot.import_llama reads",
    ord("G"): "; perhaps a model, GGUF",
}


def _read_header(source: _Source) -> Header:
    """Read the header and meta. Nothing in them is used before it is checked."""
    hasher = xxh3_128()
    for at, wanted in enumerate(MAGIC):  # byte by byte: what is foreign may be shorter
        (found,) = source.take(1, "magic", hasher)
        if found != wanted:
            hint = "not a .skv file" if at < 4 else "not a .skv file, or one that went through a transfer as text"
            if at == 0:
                hint += _LOOKS_LIKE.get(found, "")
            raise source.error(at, "magic", f"{wanted:#04x}", f"{found:#04x}", hint)
    (version,) = struct.unpack("<I", source.take(4, "version", hasher))
    if version != VERSION:
        hint = "written by a newer version of this library" if version > VERSION else "damaged"
        raise source.error(_VERSION_AT, "version", VERSION, version, hint)
    rest = source.take(_HEAD.size - _FLAGS_AT, "header", hasher)
    flags, header_bytes, n_bytes, n_sections = struct.unpack("<IQQQ", rest)
    if not 2 <= n_sections <= MAX_SECTIONS:
        raise source.error(_COUNT_AT, "number of sections", f"2 to {MAX_SECTIONS:,}", f"{n_sections:,}")
    if header_bytes != _header_bytes(n_sections):
        raise source.error(_LENGTH_AT, "header length", f"{_header_bytes(n_sections):,}", f"{header_bytes:,}")
    table = source.take(n_sections * _ENTRY.size, "section table", hasher)
    checksum = bytes(source.take(_DIGEST, "checksum of header"))
    if checksum != hasher.digest():
        at = header_bytes - _DIGEST
        raise source.error(at, "checksum of header", hasher.hexdigest(), checksum.hex(), "damaged")
    if flags != 0:
        raise source.error(_FLAGS_AT, "flags", 0, flags)
    sections, end = _read_table(source, table)
    if n_bytes != end or n_bytes > MAX_FILE:
        raise source.error(_SIZE_AT, "file length", f"{end:,}, and at most {MAX_FILE:,}", f"{n_bytes:,}")
    if source.n_bytes is not None and source.n_bytes != n_bytes:
        hint = "cut short" if source.n_bytes < n_bytes else "something follows it"
        at = min(source.n_bytes, n_bytes)
        raise source.error(at, "end of file", f"at byte {n_bytes:,}", f"at byte {source.n_bytes:,}", hint)
    text = source.section(sections[0])
    try:
        meta = _parse_meta(text)
    except (ValueError, RecursionError) as error:
        raise source.error(sections[0].offset, "meta", "a JSON object", f"not one: {str(error)[:200]}") from None
    return Header(version, meta, sections, n_bytes)


def _read_table(source: _Source, table: bytearray) -> tuple[tuple[Section, ...], int]:
    """The table's entries, and the file's size by them. Names, types and lengths decide where everything has to lie."""
    entries = list(_ENTRY.iter_unpack(table))
    begins, n_bytes = _place([length for *_, length, _ in entries])
    fixed = {0: _META, len(entries) - 1: _STATE}
    sections: dict[str, Section] = {}
    for i, ((raw_name, raw_type, offset, length, checksum), begin) in enumerate(zip(entries, begins, strict=True)):
        name, dtype = (raw.rstrip(b"\0").decode("latin-1") for raw in (raw_name, raw_type))
        wanted_type: Sequence[str]
        if i in fixed:
            name_is_right, wanted_name, wanted_type = name == fixed[i][0], fixed[i][0], fixed[i][1:]
        else:
            name_is_right = _is_array_name(name) and name not in sections
            wanted_name, wanted_type = "an array's, used once", _DTYPES
        most, item = (MAX_META if i == 0 else MAX_FILE), _ITEM_BYTES.get(dtype, 1)
        for at, field, ok, expected, actual in (  # in the order of the entry's fields
            (0, f"name of section {i}", name_is_right, wanted_name, repr(name)),
            (32, f"type of {name}", dtype in wanted_type, " or ".join(wanted_type), repr(dtype)),
            (40, f"offset of {name}", offset == begin, f"{begin:,}", f"{offset:,}"),
            (40, f"offset of {name}", offset <= MAX_BEFORE_STATE, f"at most {MAX_BEFORE_STATE:,}", f"{offset:,}"),
            (48, f"length of {name}", length <= most, f"at most {most:,}", f"{length:,}"),
            (48, f"length of {name}", length % item == 0, f"a multiple of {item}", f"{length:,}"),
        ):
            if not ok:
                raise source.error(_HEAD.size + i * _ENTRY.size + at, field, expected, actual)
        sections[name] = Section(name, dtype, offset, length, checksum)
    return tuple(sections.values()), n_bytes


# ── both ways ────────────────────────────────────────────────────────────────────────────────────────


def _place(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where sections of these lengths lie, the last one being the state, and the file's size."""
    at, offsets = _header_bytes(len(lengths)), []
    for i, length in enumerate(lengths):
        at = _round_up(at, PAGE if i == len(lengths) - 1 else ALIGNMENT)
        offsets.append(at)
        at += length
    return offsets, _round_up(at, PAGE)


def _header_bytes(n_sections: int) -> int:
    return _HEAD.size + n_sections * _ENTRY.size + _DIGEST


def _is_array_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name not in (_META[0], _STATE[0])


def _parse_meta(text: bytes | bytearray) -> dict[str, Any]:
    """Raises ValueError or RecursionError for anything but a JSON object with unique keys and finite numbers."""
    found = json.loads(
        text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
    )
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


def _check_state(state: Bytes, what: str) -> None:
    found = isinstance(state, np.ndarray) and state.dtype == np.uint8 and state.ndim == 1 and state.flags.c_contiguous
    if not found:
        raise InvalidArgumentError(f"{what} should be a contiguous uint8 array of one dimension")


def _check_stream(file: object, *methods: str) -> None:
    if not any(callable(getattr(file, method, None)) for method in methods):
        raise InvalidArgumentError(f"expected something with {' or '.join(methods)}(), got {type(file).__name__}")


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
