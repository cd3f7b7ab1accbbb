"""`.skv` files: every byte of them, streams, damage, and what a file is when saving is stopped. Needs no engine."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import skv_reader
from helpers import TESTS, run_ok
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from swarmkv_ll import cache, skv
from swarmkv_ll.cache import atomic_file, write_atomically
from swarmkv_ll.errors import (
    DiskFullError,
    EndOfStreamError,
    HostMemoryError,
    InvalidArgumentError,
    SnapshotFileError,
)
from swarmkv_ll.skv import Contents, dump, load, peek, read, save, size

DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
LEFTOVER = re.compile(r"\.swarmkv-[0-9a-f]{32}\.tmp")


def allocate(n_bytes: int) -> npt.NDArray[np.uint8]:
    return np.full(n_bytes, 0xEE, np.uint8)


def never(n_bytes: int) -> npt.NDArray[np.uint8]:
    raise AssertionError(f"{n_bytes} bytes were asked for")


def make(n_state: int = 5000, seed: int = 1) -> Contents:
    random = np.random.default_rng(seed)
    return Contents(
        {"name": "Größe", "seed": seed, "deep": {"list": [1, -2.5, None, True, "\ud800"]}},
        {
            "tokens": random.integers(0, 99, 17).astype(np.int32),
            "logits": random.random(9, np.float32),
            "tokens.3": np.empty(0, np.int32),
        },
        random.integers(0, 256, n_state).astype(np.uint8),
    )


def pack(contents: Contents) -> bytes:
    file = io.BytesIO()
    assert dump(contents, file) == len(file.getvalue()) == size(contents)
    return file.getvalue()


def unpack(data: bytes | bytearray) -> Contents:
    return read(io.BytesIO(data), allocate)


def same(a: Contents, b: Contents) -> bool:
    """Equal in every bit, with types and order."""
    left, right = ([(n, x.dtype, x.tobytes()) for n, x in c.arrays.items()] for c in (a, b))
    return json.dumps(a.meta) == json.dumps(b.meta) and left == right and a.state.tobytes() == b.state.tobytes()


def only(folder: Path, *names: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(names)


SMALL = make(100)
SMALL_BYTES = pack(SMALL)
HEADER_BYTES = 56 + 72 * 5


# ── round trips ──────────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", fullmatch=True).filter(lambda n: n not in ("meta", "state"))


@st.composite
def _array(draw: st.DrawFn) -> npt.NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    raw = draw(st.binary(max_size=200))
    return np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(max_size=9), JSON, max_size=4),
    st.dictionaries(NAMES, _array(), max_size=4),
    st.sampled_from([0, 1, 4095, 4096, 4097]),
    st.randoms(use_true_random=False),
)
def test_what_is_written_is_read(meta: dict[str, Any], arrays: dict[str, Any], n_state: int, random: Any) -> None:
    """By the library from a stream and from a file, and by the other reader."""
    contents = Contents(meta, arrays, np.frombuffer(random.randbytes(n_state), np.uint8))
    assert same(unpack(pack(contents)), contents)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.skv")
        save(path, contents)
        assert Path(path).read_bytes() == pack(contents)
        assert same(load(path, allocate), contents)
        header = peek(path)
        assert (header.meta, header.n_bytes, header.state_bytes) == (meta, size(contents), n_state)
        assert [s.name for s in header.sections] == ["meta", *arrays, "state"]
        assert [s.shape for s in header.sections[1:-1]] == [a.shape for a in arrays.values()]
        other_meta, other_arrays, state = skv_reader.read(path)
        assert same(Contents(other_meta, other_arrays, np.asarray(state)), contents)


def test_the_state_is_read_into_the_memory_that_was_given(tmp_path: Path) -> None:
    save(tmp_path / "x.skv", SMALL)
    asked: list[int] = []
    memory = np.zeros(200, np.uint8)

    def give(n_bytes: int) -> npt.NDArray[np.uint8]:
        asked.append(n_bytes)
        return memory[50:150]

    found = load(tmp_path / "x.skv", give)
    assert asked == [100]
    assert np.shares_memory(found.state, memory)
    assert memory[50:150].tobytes() == SMALL.state.tobytes()
    assert not memory[:50].any()
    assert not memory[150:].any()
    found.arrays["tokens"][0] = 1  # writable, and of the reader alone


def test_arrays_of_any_byte_order_and_stride_and_read_only_ones() -> None:
    state = np.arange(100, dtype=np.uint8)
    state.flags.writeable = False
    arrays = {"big": np.arange(5, dtype=">i4"), "every.second": np.arange(10, dtype=np.float32)[::2]}
    found = unpack(pack(Contents({}, arrays, state)))
    assert found.arrays["big"].tolist() == [0, 1, 2, 3, 4]
    assert found.arrays["big"].dtype == np.int32
    assert found.arrays["every.second"].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("direct", [False, True])
def test_another_reader_reads_what_is_saved(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "x.skv"
    for contents in (make(0), make(4096), make(3 << 20)):
        save(path, contents)
        try:
            meta, arrays, state = skv_reader.read(path, os.O_DIRECT if direct else 0)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                pytest.skip("this file system has no O_DIRECT")
            raise
        assert same(Contents(meta, arrays, np.asarray(state)), contents)


def test_the_example_in_the_format_description() -> None:
    contents = Contents({"n": 3}, {"tokens": np.array([1, 22, 333], np.int32)}, np.frombuffer(b"KV!", np.uint8))
    text = (TESTS.parent / "docs" / "format.md").read_text(encoding="utf-8")
    shown = bytearray()
    for line in re.findall(r"^([0-9a-f]{8})(.*)$", text, re.MULTILINE):
        at = int(line[0], 16)
        shown += shown[-16:] * ((at - len(shown)) // 16)  # what a * stands for
        shown += bytes.fromhex(line[1].partition("|")[0])
    assert shown == pack(contents)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────


def _socket_ends(buffering: int) -> tuple[Any, Any]:
    a, b = socket.socketpair()
    with a, b:
        return a.makefile("wb", buffering=buffering), b.makefile("rb", buffering=buffering)


def _pipe_ends(buffering: int) -> tuple[Any, Any]:
    r, w = os.pipe()
    return open(w, "wb", buffering=buffering), open(r, "rb", buffering=buffering)


class Dribble:
    """Has `read` and `write` only, and takes and gives a few bytes a call."""

    def __init__(self, file: Any) -> None:
        self.file, self.turn = file, 0

    def write(self, buffer: memoryview) -> int:
        self.turn += 1
        return int(self.file.write(buffer[: 1 + self.turn % 777]))

    def read(self, n_bytes: int) -> bytes:
        self.turn += 1
        return bytes(self.file.read(min(n_bytes, 1 + self.turn % 777)))


def _dribbling_ends(buffering: int) -> tuple[Any, Any]:
    return tuple(Dribble(end) for end in _pipe_ends(buffering))  # type: ignore[return-value]


@pytest.mark.parametrize("buffering", [0, 8192])
@pytest.mark.parametrize("ends", [_socket_ends, _pipe_ends, _dribbling_ends])
def test_several_snapshots_in_one_stream(ends: Callable[[int], tuple[Any, Any]], buffering: int) -> None:
    """One after the other, and not a byte beyond the last."""
    writer, reader = ends(buffering)
    sent = [make(300_000, 1), make(0, 2), make(4096, 3)]

    def send() -> None:
        for contents in sent:
            dump(contents, writer)
        writer.write(b"tail")
        getattr(writer, "file", writer).close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for contents in sent:
            assert same(read(reader, allocate), contents)
        assert b"".join(iter(lambda: reader.read(100), b"")) == b"tail"
        with pytest.raises(EndOfStreamError, match="at its end") as caught:
            read(reader, never)
        assert isinstance(caught.value, EOFError)
    finally:
        thread.join()
        getattr(reader, "file", reader).close()


class Answers:
    """A stream whose `write` and `read` give what they are told to."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def write(self, buffer: memoryview) -> Any:
        return self.answer

    def readinto(self, buffer: memoryview) -> Any:
        return self.answer

    def read(self, n_bytes: int) -> Any:
        return bytes(self.answer) if isinstance(self.answer, int) else self.answer


class AnswersRead:
    """The same without `readinto`."""

    def __init__(self, answer: object) -> None:
        self.read = Answers(answer).read


@pytest.mark.parametrize(("answer", "kind"), [(None, BlockingIOError), (0, OSError), (-1, OSError), (1 << 30, OSError)])
def test_a_write_that_does_not_say_how_much_it_took_is_refused(answer: object, kind: type[OSError]) -> None:
    with pytest.raises(kind, match=r"write\(\) of") as caught:
        dump(SMALL, Answers(answer))
    assert caught.value.errno in (errno.EAGAIN, errno.EIO)


@pytest.mark.parametrize("stream", [Answers, AnswersRead])
def test_a_read_that_gives_nonsense_is_refused(stream: Callable[[object], Any]) -> None:
    with pytest.raises(BlockingIOError, match="non-blocking"):
        read(stream(None), never)
    with pytest.raises(OSError, match=r"gave 2 bytes, asked for 1"):
        read(stream(2), never)
    if stream is Answers:
        with pytest.raises(OSError, match=r"gave -1 bytes"):
            read(stream(-1), never)


def test_text_streams_are_refused() -> None:
    with pytest.raises(TypeError):
        dump(SMALL, io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        read(io.StringIO("\x89SKV"), never)  # type: ignore[arg-type]


def test_non_blocking_pipes_are_refused() -> None:
    writer, reader = _pipe_ends(0)
    with writer, reader:
        os.set_blocking(writer.fileno(), False)
        os.set_blocking(reader.fileno(), False)
        with pytest.raises(BlockingIOError):
            read(reader, never)
        with pytest.raises(BlockingIOError):
            dump(make(1 << 20), writer)


def test_a_reader_that_went_away() -> None:
    writer, reader = _pipe_ends(0)
    reader.close()
    with writer, pytest.raises(BrokenPipeError):
        dump(SMALL, writer)


def test_dump_into_a_full_device() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(DiskFullError) as caught:
        dump(SMALL, full)
    assert isinstance(caught.value, OSError)
    assert (caught.value.errno, caught.value.required, caught.value.available) == (errno.ENOSPC, 8192, None)
    assert "8,192 bytes to write" in str(caught.value)


# ── what a file cannot hold ──────────────────────────────────────────────────────────────────────────


def _too_deep() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(100_000):
        found = {"a": found}
    return found


def _circular() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["a"] = found
    return found


STATE = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (Contents([1], {}, STATE), "a list"),  # type: ignore[arg-type]
        (Contents({"a": float("nan")}, {}, STATE), "JSON"),
        (Contents({"a": float("inf")}, {}, STATE), "JSON"),
        (Contents({"a": (1, 2)}, {}, STATE), "not tuples"),
        (Contents({1: 2}, {}, STATE), "text keys"),  # type: ignore[dict-item]
        (Contents({1: 2, "1": 3}, {}, STATE), "twice"),  # type: ignore[dict-item]
        (Contents({"a": b"x"}, {}, STATE), "bytes"),
        (Contents({"a": np.int32(1)}, {}, STATE), "int32"),
        (Contents({"a": 10**5000}, {}, STATE), "digits"),
        (Contents(_too_deep(), {}, STATE), "recursion"),
        (Contents(_circular(), {}, STATE), "Circular"),
        (Contents({"a": "x" * (16 << 20)}, {}, STATE), "at most 16,777,216 bytes of meta"),
        (Contents({}, {"": STATE}, STATE), "no name"),
        (Contents({}, {"meta": STATE}, STATE), "no name"),
        (Contents({}, {"state": STATE}, STATE), "no name"),
        (Contents({}, {".x": STATE}, STATE), "no name"),
        (Contents({}, {"x\n": STATE}, STATE), "no name"),
        (Contents({}, {"ä": STATE}, STATE), "no name"),
        (Contents({}, {"a" * 33: STATE}, STATE), "no name"),
        (Contents({}, {"a": np.zeros(2, bool)}, STATE), "bool"),
        (Contents({}, {"a": np.zeros(2, complex)}, STATE), "complex"),
        (Contents({}, {"a": np.zeros(2, object)}, STATE), "object"),
        (Contents({}, {"a": np.zeros(2, "U4")}, STATE), "U4"),
        (Contents({}, {"a": np.zeros((2, 2))}, STATE), r"\(2, 2\)"),
        (Contents({}, {"a": np.array(1)}, STATE), r"\(\)"),
        (Contents({}, {f"a{i}": STATE[:0] for i in range(65_534)}, STATE), "at most 65,535 sections, not 65,536"),
        (Contents({}, {}, np.zeros(8, np.int8)), "uint8"),  # type: ignore[arg-type]
        (Contents({}, {}, np.zeros((2, 4), np.uint8)), "one dimension"),
        (Contents({}, {}, STATE[::2]), "contiguous"),
        (Contents({}, {}, b"12345678"), "uint8"),  # type: ignore[arg-type]
    ],
)
def test_refused_before_a_byte_is_written(contents: Contents, says: str, tmp_path: Path) -> None:
    path, stream = tmp_path / "x.skv", io.BytesIO()
    save(path, SMALL)
    for write in (size, lambda c: dump(c, stream), lambda c: save(path, c)):
        with pytest.raises(InvalidArgumentError, match=says):
            write(contents)
    assert stream.getvalue() == b""
    assert same(load(path, allocate), SMALL)
    assert only(tmp_path, "x.skv")


def test_as_many_sections_as_there_may_be() -> None:
    file = io.BytesIO()
    dump(Contents({}, {f"a{i}": STATE[:1] for i in range(65_533)}, STATE), file)
    found = unpack(file.getvalue())
    assert list(found.arrays) == [f"a{i}" for i in range(65_533)]


@pytest.mark.parametrize("gives", [np.zeros(99, np.uint8), np.zeros(100, np.int8), np.zeros(200, np.uint8)[::2], None])
def test_memory_that_does_not_fit(gives: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"allocate\(100\)"):
        read(io.BytesIO(SMALL_BYTES), lambda n_bytes: gives)


def test_memory_that_is_read_only_or_not_to_be_had() -> None:
    fixed = np.zeros(100, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="read-only"):
        read(io.BytesIO(SMALL_BYTES), lambda n_bytes: fixed)

    def refuse(n_bytes: int) -> npt.NDArray[np.uint8]:
        raise HostMemoryError(n_bytes, 0)

    with pytest.raises(HostMemoryError, match="100 bytes"):
        read(io.BytesIO(SMALL_BYTES), refuse)


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────


def regions(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Begin, end and what an error calls it, of everything behind the header."""
    end = HEADER_BYTES
    for entry in range(40, HEADER_BYTES - 16, 72):
        offset, length = struct.unpack_from("<QQ", data, entry + 40)
        yield end, offset, "padding"
        end = offset + length
        yield offset, end, f"checksum of {data[entry : entry + 32].rstrip(bytes(1)).decode()}"
    yield end, len(data), "padding"


def test_any_bit_of_the_header_counts() -> None:
    fields = {"magic": range(8), "version": range(8, 12), "header length": range(16, 24)}
    fields |= {"number of sections": range(32, 40)}
    for at in range(HEADER_BYTES):
        wanted = next((name for name, places in fields.items() if at in places), "checksum of header")
        for bit in range(8):
            damaged = bytearray(SMALL_BYTES)
            damaged[at] ^= 1 << bit
            with pytest.raises(SnapshotFileError) as caught:
                read(io.BytesIO(damaged), never)
            # the number of sections and the header's length check each other
            assert caught.value.field in ((wanted, "header length") if at in range(32, 40) else (wanted,))


def test_any_byte_behind_the_header_counts() -> None:
    """Sections by their checksum, padding by being zero; each is named, with its place."""
    for begin, end, name in regions(SMALL_BYTES):
        for at in {*range(begin, end, 7 if end - begin > 1000 else 1), *range(max(begin, end - 1), end)}:
            damaged = bytearray(SMALL_BYTES)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(SnapshotFileError) as caught:
                unpack(damaged)
            assert caught.value.field == name
            assert caught.value.offset == (at if name == "padding" else begin)
            assert f"byte {caught.value.offset:,}" in str(caught.value)


def test_cut_anywhere(tmp_path: Path) -> None:
    """At and beside each border of a field or section: refused before the state's memory is asked for, if in a file."""
    borders = {0, *range(41), *(40 + 72 * i + field for i in range(5) for field in (0, 32, 40, 48, 56)), HEADER_BYTES}
    borders |= {at for begin, end, _ in regions(SMALL_BYTES) for at in (begin, end)}
    path = tmp_path / "x.skv"
    for n_bytes in sorted({near for at in borders for near in (at - 1, at, at + 1)} & set(range(len(SMALL_BYTES)))):
        path.write_bytes(SMALL_BYTES[:n_bytes])
        for call in (lambda: load(path, never), lambda: peek(path)):
            with pytest.raises(SnapshotFileError, match="cut short") as caught:
                call()
            assert (caught.value.path, caught.value.offset) == (str(path), n_bytes)
        with pytest.raises(SnapshotFileError) as caught:
            unpack(SMALL_BYTES[:n_bytes])
        assert (caught.value.path, caught.value.offset) == (None, n_bytes)
        assert isinstance(caught.value, EndOfStreamError) == (n_bytes == 0)


def test_a_file_with_something_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "x.skv"
    path.write_bytes(SMALL_BYTES + SMALL_BYTES)
    for call in (lambda: load(path, never), lambda: peek(path)):
        with pytest.raises(SnapshotFileError, match="something follows"):
            call()
    with open(path, "rb") as file:
        assert same(read(file, allocate), SMALL)
        assert same(read(file, allocate), SMALL)


@pytest.mark.parametrize(
    "data",
    [b"x", b"GGUF" + bytes(5000), b"PK\x03\x04", bytes(8192), b"\x89PNG\r\n\x1a\n" + bytes(5000), b"\xff" * 9000],
)
def test_foreign_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.skv"
    path.write_bytes(data)
    with pytest.raises(SnapshotFileError, match=r"not a \.skv file"):
        load(path, never)


@pytest.mark.parametrize(
    ("old", "new"), [(b"\r\n", b"\n"), (b"\n", b"\r\n"), (b"\x1a", b""), (b"\x89", b"\xc2\x89"), (b"\x89", b"\x09")]
)
def test_a_transfer_as_text_shows_in_the_first_bytes(old: bytes, new: bytes) -> None:
    with pytest.raises(SnapshotFileError, match=r"not a \.skv file") as caught:
        read(io.BytesIO(SMALL_BYTES.replace(old, new)), never)
    assert caught.value.offset < 8


def test_files_spliced_from_two() -> None:
    """Of the same structure, each whole in itself."""
    a, b = pack(make(100, 1)), pack(make(100, 2))
    spans = [
        (begin, end, name) for begin, end, name in regions(a) if name != "padding" and a[begin:end] != b[begin:end]
    ]
    assert [name for *_, name in spans] == [f"checksum of {name}" for name in ("meta", "tokens", "logits", "state")]
    for begin, end, name in spans:
        with pytest.raises(SnapshotFileError) as caught:
            unpack(a[:begin] + b[begin:end] + a[end:])
        assert caught.value.field == name
        with pytest.raises(SnapshotFileError) as caught:
            unpack(a[:begin] + b[begin:])
        assert caught.value.field == name
    with pytest.raises(SnapshotFileError, match="checksum of header"):
        unpack(a[:112] + b[112:])


# ── headers that lie, with checksums that are right ──────────────────────────────────────────────────

Entry = tuple[bytes, bytes, int, int]


def forge(entries: Sequence[Entry], data: Sequence[bytes] = (), **head: Any) -> bytes:
    """A file by hand: a table of (name, type, offset, length), data at those offsets, and the head's fields."""
    n = len(entries)
    values = {"magic": skv.MAGIC, "version": 1, "flags": 0, "n_header": 56 + 72 * n, "n_file": 8192, "n": n, **head}
    header = bytearray(struct.pack("<8sIIQQQ", *values.values()))
    sums = [xxh3_128(piece).digest() for piece in data] or [bytes(16)] * n
    for (name, kind, offset, length), checksum in zip(entries, sums, strict=True):
        header += struct.pack("<32s8sQQ16s", name, kind, offset, length, checksum)
    header += xxh3_128(header).digest()
    file = bytearray(max(8192, len(header)))
    file[: len(header)] = header
    for (_, _, offset, _), piece in zip(entries, data, strict=False):
        file[offset : offset + len(piece)] = piece
    return bytes(file)


META: Entry = (b"meta", b"json", 320, 2)
ARRAY: Entry = (b"a", b"i4", 384, 8)
LAST: Entry = (b"state", b"u1", 4096, 100)
LARGEST = 2**64 - 1


def test_written_by_hand() -> None:
    found = unpack(forge([META, ARRAY, LAST], [b"{}", struct.pack("<ii", 1, -2), bytes(100)]))
    assert found.meta == {}
    assert found.arrays["a"].tolist() == [1, -2]
    assert found.state.tolist() == [0] * 100


def _lie(entry: Entry, **fields: Any) -> Entry:
    return tuple({**dict(zip(("name", "kind", "offset", "length"), entry, strict=True)), **fields}.values())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("data", "offset", "field"),
    [
        *[(forge([META, ARRAY, LAST], version=v), 8, "version") for v in (0, 2, 2**32 - 1)],
        *[(forge([META, ARRAY, LAST], flags=v), 12, "flags") for v in (1, 2**31)],
        *[(forge([META, ARRAY, LAST], n_header=v), 16, "header length") for v in (0, 271, 273, 2**63, LARGEST)],
        *[(forge([META, ARRAY, LAST], n_file=v), 24, "file length") for v in (0, 4096, 8191, 2**63, LARGEST)],
        *[(forge([META, ARRAY, LAST], n=v), 32, "number of sections") for v in (0, 1, 65536, 2**32 + 3, LARGEST)],
        (forge([META, ARRAY, LAST], n=2), 16, "header length"),
        (forge([META]), 32, "number of sections"),
        (forge([LAST, LAST]), 40, "name of section 0"),
        (forge([_lie(META, name=b"Meta"), LAST]), 40, "name of section 0"),
        (forge([_lie(META, offset=256), _lie(LAST, name=b"rest")]), 112, "name of section 1"),
        *[
            (forge([META, _lie(ARRAY, name=name), LAST]), 112, "name of section 1")
            for name in (b"", b"meta", b"state", b"a\0b", b"\0a", b"a b", b".a", b"\xe4", b"/etc/passwd")
        ],
        (
            forge([_lie(META, offset=384), _lie(ARRAY, offset=448), _lie(ARRAY, offset=512), LAST]),
            184,
            "name of section 2",
        ),
        (forge([META, LAST, _lie(ARRAY, offset=4224)]), 112, "name of section 1"),
        (forge([_lie(META, kind=b"u1"), ARRAY, LAST]), 72, "type of meta"),
        (forge([META, ARRAY, _lie(LAST, kind=b"i1")]), 216, "type of state"),
        *[
            (forge([META, _lie(ARRAY, kind=kind), LAST]), 144, "type of a")
            for kind in (b"", b"json", b"O8", b"c8", b"f16", b"b1", b"i3", b"<i4", b"i4\0x", b"V8", b"U4")
        ],
        *[
            (forge([_lie(META, offset=v), ARRAY, LAST]), 80, "offset of meta")
            for v in (0, 272, 319, 321, 384, 2**63, LARGEST)
        ],
        *[
            (forge([META, _lie(ARRAY, offset=v), LAST]), 152, "offset of a")
            for v in (0, 320, 322, 383, 448, 4096, 2**63, LARGEST - 3)
        ],
        *[(forge([META, ARRAY, _lie(LAST, offset=v)]), 224, "offset of state") for v in (0, 384, 8192, LARGEST - 4095)],
        (forge([_lie(META, offset=256, length=2**24 + 1), LAST]), 88, "length of meta"),
        (forge([META, _lie(ARRAY, length=9), LAST]), 160, "length of a"),
        *[(forge([META, _lie(ARRAY, length=v), LAST]), 224, "offset of state") for v in (4096, 2**30, 2**63 - 4096)],
        *[(forge([META, _lie(ARRAY, length=v), LAST]), 160, "length of a") for v in (2**63, LARGEST - 3)],
        (
            forge([META, _lie(ARRAY, length=2**30), _lie(LAST, offset=2**30 + 4096)]),
            224,
            "offset of state",
        ),
        (forge([_lie(META, length=LARGEST), ARRAY, LAST]), 88, "length of meta"),
        *[(forge([META, ARRAY, _lie(LAST, length=v)]), 24, "file length") for v in (0, 4097, 2**63 - 4096)],
        *[(forge([META, ARRAY, _lie(LAST, length=v)]), 232, "length of state") for v in (2**63 - 1, 2**63, LARGEST)],
        (forge([META, ARRAY, _lie(LAST, length=2**63 - 4096)], n_file=2**63), 24, "file length"),
    ],
)
def test_a_header_that_contradicts_itself(data: bytes, offset: int, field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.skv"
    path.write_bytes(data)
    for call in (lambda: read(io.BytesIO(data), never), lambda: load(path, never), lambda: peek(path)):
        with pytest.raises(SnapshotFileError) as caught:
            call()
        assert (caught.value.offset, caught.value.field) == (offset, field)
        assert str(caught.value.expected) in str(caught.value)
        assert str(caught.value.actual) in str(caught.value)


def test_a_newer_version_is_refused_with_its_number() -> None:
    """Whatever the rest of it looks like."""
    data = bytearray(SMALL_BYTES[:12] + b"\xff" * 20)
    struct.pack_into("<I", data, 8, 7)
    with pytest.raises(SnapshotFileError, match=r"version should be 1, is 7 \(written by a newer version"):
        read(io.BytesIO(data), never)


def test_memory_is_taken_as_bytes_come() -> None:
    """A stream that promises much and then ends costs its reader little."""
    array = _lie(ARRAY, length=2**30 - 8192)
    last = _lie(LAST, offset=2**30 - 4096, length=2**40)
    promising = forge([META, array, last], n_file=2**30 + 2**40)[:272]
    many = forge([META] * 65535)[: 40 + 72 * 100]
    for data in (promising + bytes(48) + b"{}", promising, many):
        tracemalloc.start()
        try:
            with pytest.raises(SnapshotFileError):
                read(io.BytesIO(data), never)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_a_state_beyond_what_a_stream_may_hold_is_for_allocate_to_refuse() -> None:
    meta, last = _lie(META, offset=256), _lie(LAST, length=2**62)
    data = forge([meta, last], [b"{}", b""], n_file=2**62 + 4096)

    def refuse(n_bytes: int) -> npt.NDArray[np.uint8]:
        raise HostMemoryError(n_bytes, 1)

    with pytest.raises(HostMemoryError, match=f"{2**62:,}"):
        read(io.BytesIO(data), refuse)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b"{} {}",
        b"{",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"b": [{"a": 1, "a": 1}]}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 200_000,
        b'{"a": ' * 200_000,
        b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_meta_that_is_no_json_object(text: bytes) -> None:
    end = 256 + len(text)
    begin = -(-end // 4096) * 4096
    meta, last = _lie(META, offset=256, length=len(text)), _lie(LAST, offset=begin)
    data = forge([meta, last], [text, bytes(100)], n_file=begin + 4096)
    with pytest.raises(SnapshotFileError, match="meta should be a JSON object") as caught:
        read(io.BytesIO(data + bytes(begin + 4096 - len(data))), never)
    assert (caught.value.offset, caught.value.field) == (256, "meta")
    assert len(str(caught.value)) < 500


ENTRIES = st.tuples(
    st.sampled_from([b"meta", b"state", b"a", b"b", b""]) | st.binary(max_size=32),
    st.sampled_from([b"json", b"u1", b"i4", b"f8"]) | st.binary(max_size=8),
    st.sampled_from([256, 320, 384, 448, 4096]) | st.integers(0, LARGEST),
    st.sampled_from([0, 2, 8, 100]) | st.integers(0, LARGEST),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ENTRIES, max_size=4), st.sampled_from([4096, 8192]) | st.integers(0, LARGEST), st.booleans())
def test_any_header_is_read_or_refused(entries: list[Entry], n_file: int, frame: bool) -> None:
    """Nothing but a SnapshotFileError, and never more memory than the file could fill."""
    if frame:
        entries = [_lie(META, offset=(56 + 72 * (len(entries) + 2) + 63) // 64 * 64), *entries, LAST]
    data = forge(entries, n_file=n_file)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()

        def bounded(n_bytes: int) -> npt.NDArray[np.uint8]:
            assert n_bytes <= len(data)
            return allocate(n_bytes)

        with pytest.raises(SnapshotFileError) as caught:  # at the latest by the sections' checksums
            load(file.name, bounded)
        assert str(caught.value.offset) in str(caught.value).replace(",", "")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SMALL_BYTES)), st.integers(0, 20), st.binary(max_size=20)), min_size=1, max_size=3
    )
)
def test_any_change_is_found(changes: list[tuple[int, int, bytes]]) -> None:
    """Bytes replaced, put in and left out, anywhere."""
    data = SMALL_BYTES
    for at, gone, put in changes:
        data = data[:at] + put + data[at + gone :]
    if data[: len(SMALL_BYTES)] == SMALL_BYTES:
        assert same(unpack(data), SMALL)
    else:
        with pytest.raises(SnapshotFileError):
            unpack(data)


def test_peek_reads_neither_arrays_nor_state(tmp_path: Path) -> None:
    path = tmp_path / "x.skv"
    save(path, SMALL)
    good = peek(path)
    assert good.version == 1
    assert [(s.name, s.dtype, s.shape) for s in good.sections[1:]] == [
        ("tokens", "i4", (17,)),
        ("logits", "f4", (9,)),
        ("tokens.3", "i4", (0,)),
        ("state", "u1", (100,)),
    ]
    for section in good.sections:
        assert section.checksum == xxh3_128(SMALL_BYTES[section.offset :][: section.length]).digest()
    damaged = bytearray(SMALL_BYTES)
    damaged[good.sections[1].offset] ^= 1
    damaged[good.sections[-1].offset] ^= 1
    path.write_bytes(damaged)
    assert peek(path) == good


# ── what an exception keeps alive ────────────────────────────────────────────────────────────────────


class Stops:
    """A stream that is interrupted behind `n_bytes`."""

    def __init__(self, data: bytes = b"", n_bytes: int = 0, error: BaseException | None = None) -> None:
        self.file, self.left, self.error = io.BytesIO(data), n_bytes, error

    def readinto(self, buffer: memoryview) -> int:
        self.left -= len(buffer)
        if self.left < 0 and self.error:
            raise self.error
        return self.file.readinto(buffer)

    def write(self, buffer: memoryview) -> int:
        self.left -= len(buffer)
        if self.left < 0 and self.error:
            raise self.error
        return len(buffer)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_failed_read_leaves_no_view_of_the_memory(error: BaseException | None) -> None:
    """So that whoever gave it can take it back while the exception is still handled."""
    damaged = bytearray(SMALL_BYTES)
    damaged[4100] ^= 1
    views: list[weakref.ref[Any]] = []

    def give(n_bytes: int) -> npt.NDArray[np.uint8]:
        memory = allocate(n_bytes)
        views.append(weakref.ref(memory))
        return memory

    try:
        read(Stops(bytes(damaged), 4096 if error else 1 << 30, error), give)
    except BaseException as caught:
        assert isinstance(caught, type(error) if error else SnapshotFileError)  # noqa: PT017 - looks inside the handler
        assert views[0]() is None
    else:
        pytest.fail("not refused")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failed_write_leaves_no_view_of_the_state(error: BaseException) -> None:
    state = np.zeros(100, np.uint8)
    view = weakref.ref(state)
    contents = Contents({}, {}, state)
    del state
    stream = Stops(n_bytes=4096, error=error)
    try:
        dump(contents, stream)
    except BaseException:
        del contents
        assert view() is None
    else:
        pytest.fail("not refused")


# ── files on the disk ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_permissions(tmp_path: Path, umask: Callable[[int], int]) -> None:
    """A new file's by the umask; one that is replaced passes its own on."""
    path = tmp_path / "x.skv"
    for mask, bits in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        umask(mask)
        path.unlink(missing_ok=True)
        save(path, SMALL)
        assert path.stat().st_mode & 0o777 == bits
    umask(0o022)
    for bits in (0o600, 0o660, 0o444, 0o666):
        path.chmod(bits)
        save(path, SMALL)
        assert path.stat().st_mode & 0o777 == bits
    assert only(tmp_path, "x.skv")


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    target, link, chain = tmp_path / "store" / "x.skv", tmp_path / "link", tmp_path / "chain"
    link.symlink_to("store/x.skv")
    chain.symlink_to(link)
    save(chain, SMALL)  # to where there is nothing yet
    assert same(load(target, allocate), SMALL)
    target.chmod(0o600)
    save(link, make(7))
    assert same(load(chain, allocate), make(7))
    assert link.is_symlink()
    assert chain.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert only(tmp_path / "store", "x.skv")
    assert only(tmp_path, "store", "link", "chain")


def test_another_name_of_a_file_keeps_what_it_had(tmp_path: Path) -> None:
    path, other = tmp_path / "x.skv", tmp_path / "other"
    save(path, SMALL)
    other.hardlink_to(path)
    save(path, make(7))
    assert same(load(other, allocate), SMALL)


def test_places_that_cannot_be_saved_to(tmp_path: Path) -> None:
    loop, pipe, file = tmp_path / "loop", tmp_path / "pipe", tmp_path / "file"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    file.touch()
    for path, kind, says in (
        (tmp_path, IsADirectoryError, "Is a directory"),
        (pipe, OSError, "Not a regular file"),
        (Path("/dev/null"), OSError, "Not a regular file"),
        (loop, OSError, "symbolic link"),
        (tmp_path / "none" / "x.skv", FileNotFoundError, "No such file"),
        (file / "x.skv", NotADirectoryError, "Not a directory"),
        (tmp_path / ("x" * 300), OSError, "too long"),
    ):
        with pytest.raises(kind, match=says) as caught:
            save(path, SMALL)
        assert caught.value.filename == str(path)
    assert only(tmp_path, "loop", "pipe", "file")


def test_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    save(path, SMALL)
    save(path, make(7))
    assert same(load(path, allocate), make(7))


def test_places_that_cannot_be_loaded_from(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for call in (peek, lambda path: load(path, never)):
        with pytest.raises(IsADirectoryError):
            call(tmp_path)
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")
        with pytest.raises(OSError, match="Not a regular file"):
            call(tmp_path / "pipe")
        with pytest.raises(OSError, match="Not a regular file"):
            call("/dev/zero")


def test_a_folder_that_is_read_only() -> None:
    with tempfile.TemporaryDirectory() as name:  # not in pytest's folder, which is its user's alone
        folder = Path(name)
        save(folder / "x.skv", SMALL)
        folder.chmod(0o555)
        try:
            printed = run_ok(
                """
                import os, sys
                import numpy as np
                from swarmkv_ll import skv
                if os.geteuid() == 0:
                    os.setgroups([]), os.setgid(65534), os.setuid(65534)
                try:
                    skv.save(sys.argv[1], skv.Contents({}, {}, np.zeros(9, np.uint8)))
                except PermissionError as error:
                    print(error.filename)
                """,
                folder / "x.skv",
            )
        finally:
            folder.chmod(0o755)
        assert printed == str(folder / "x.skv")
        assert only(folder, "x.skv")
        assert same(load(folder / "x.skv", allocate), SMALL)


def test_a_folder_that_can_be_written_but_not_listed() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o333)
        try:
            run_ok(
                """
                import os, sys
                import numpy as np
                from swarmkv_ll import skv
                if os.geteuid() == 0:
                    os.setgroups([]), os.setgid(65534), os.setuid(65534)
                skv.save(sys.argv[1], skv.Contents({}, {}, np.zeros(9, np.uint8)))
                """,
                folder / "x.skv",
            )
        finally:
            folder.chmod(0o755)
        assert peek(folder / "x.skv").state_bytes == 9


def test_a_full_disk(tmp_path: Path) -> None:
    """Really full: a file system of 1 MiB, mounted in a namespace that ends with its process."""
    code = """
        import errno, os, subprocess, sys
        import numpy as np
        from swarmkv_ll import skv
        from swarmkv_ll.errors import DiskFullError
        folder = sys.argv[1]
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], stderr=subprocess.DEVNULL).returncode:
            sys.exit(77)
        path = os.path.join(folder, "x.skv")
        small, large = (skv.Contents({}, {}, np.full(n, 7, np.uint8)) for n in (100_000, 2_000_000))
        for before in ([], ["x.skv"]):
            try:
                skv.save(path, large)
            except DiskFullError as error:
                assert error.errno == errno.ENOSPC and error.filename == path, error
                assert error.required == skv.size(large), error.required
                assert 800_000 < error.available <= 1 << 20, error.available
                assert f"{error.available:,} free" in str(error)
            else:
                sys.exit("not refused")
            assert os.listdir(folder) == before
            skv.save(path, small)
        assert skv.load(path, lambda n: np.empty(n, np.uint8)).state.tobytes() == small.state.tobytes()
    """
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        done = subprocess.run(
            [*unshare, sys.executable, "-c", textwrap.dedent(code), tmp_path],
            env={**os.environ, "PYTHONPATH": str(Path(skv.__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    save(tmp_path / "x.skv", SMALL)
    run_ok(
        """
        import errno, resource, sys
        import numpy as np
        from swarmkv_ll import skv
        from swarmkv_ll.errors import DiskFullError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            skv.save(sys.argv[1], skv.Contents({}, {}, np.zeros(200_000, np.uint8)))
        except DiskFullError as error:
            assert (error.errno, error.required, error.available) == (errno.EFBIG, 204_800, None), error
        else:
            sys.exit("not refused")
        """,
        tmp_path / "x.skv",
    )
    assert same(load(tmp_path / "x.skv", allocate), SMALL)
    assert only(tmp_path, "x.skv")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.skv"
    save(path, make(3 << 20))

    def cut(n_bytes: int) -> npt.NDArray[np.uint8]:
        os.truncate(path, 5000)
        return allocate(n_bytes)

    with pytest.raises(SnapshotFileError, match=r"state should be 3,144,824 bytes more, is the end"):
        load(path, cut)


WRITES = """
    import os, random, signal, sys, time
    import numpy as np
    from swarmkv_ll import skv

    path = sys.argv[1]
    folder = os.path.dirname(path)

    def contents(seed, n):
        return skv.Contents({"seed": seed, "n": n}, {}, np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8))

    def check():
        found = skv.load(path, lambda n: np.empty(n, np.uint8))
        assert found.state.tobytes() == contents(**found.meta).state.tobytes()
        return found.meta["seed"]

    def fork(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0)
        return pid
"""


def run_writes(code: str, path: Path) -> str:
    return run_ok(textwrap.dedent(WRITES) + textwrap.dedent(code), path)


def test_flushed_renamed_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, or a machine that stops could keep the new name without its bytes."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def watched_replace(a: Path, b: Path) -> None:
        seen.append(("replace", str(a)))
        replace(a, b)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save(tmp_path / "x.skv", SMALL)
    temporary = seen[0][1]
    assert LEFTOVER.fullmatch(Path(temporary).name)
    assert seen == [("fsync", temporary), ("replace", temporary), ("fsync", str(tmp_path))]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The old file or the new one is there, whole; what is left behind can be recognised."""
    path = tmp_path / "x.skv"
    printed = run_writes(
        """
        both = contents(0, 1_000_000), contents(1, 3_000_000)
        skv.save(path, both[0])

        def work():
            while True:
                for one in both:
                    skv.save(path, one)

        seen = set()
        for _ in range(30):
            pid = fork(work)
            time.sleep(random.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            seen.add(check())
        print(seen)
        """,
        path,
    )
    assert set(json.loads(printed.translate({ord("{"): "[", ord("}"): "]"}))) <= {0, 1}
    names = set(os.listdir(tmp_path)) - {"x.skv"}
    assert all(LEFTOVER.fullmatch(name) for name in names)
    save(path, SMALL)  # what was left behind is in nobody's way
    assert same(load(path, allocate), SMALL)


def test_two_processes_that_save_to_one_name(tmp_path: Path) -> None:
    """A reader finds one's file or the other's, whole, at any time."""
    run_writes(
        """
        both = contents(0, 1_000_000), contents(1, 600_000)
        skv.save(path, both[0])
        stop = path + ".stop"

        def work(one):
            while not os.path.exists(stop):
                skv.save(path, one)

        pids = [fork(lambda one=one: work(one)) for one in both]
        seen, until = [], time.monotonic() + 1
        while time.monotonic() < until or len(set(seen)) < 2:
            seen.append(check())
        open(stop, "w").close()
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
        check()
        assert sorted(os.listdir(folder)) == ["x.skv", "x.skv.stop"], os.listdir(folder)
        """,
        tmp_path / "x.skv",
    )


def test_threads_that_save_to_one_name(tmp_path: Path) -> None:
    path = tmp_path / "x.skv"

    def work(seed: int) -> None:
        for _ in range(10):
            save(path, make(5000 * seed, seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load(path, allocate)
    assert same(found, make(5000 * found.meta["seed"], found.meta["seed"]))
    assert only(tmp_path, "x.skv")


def test_interrupted_at_any_moment(tmp_path: Path) -> None:
    """After a Ctrl-C nothing is left behind, and the old file or the new one is there."""
    printed = run_writes(
        """
        both = contents(0, 200_000), contents(1, 300_000)
        skv.save(path, both[0])

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        n_interrupted = 0
        for i in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))
                skv.save(path, both[i % 2])
                skv.save(path, both[i % 2])
                time.sleep(0.01)
            except KeyboardInterrupt:
                n_interrupted += 1
            assert os.listdir(folder) == ["x.skv"], os.listdir(folder)
            check()
        print(n_interrupted)
        """,
        tmp_path / "x.skv",
    )
    assert int(printed) > 100  # not all of them: Python drops one that comes inside a finalizer


# ── atomic_file for others ───────────────────────────────────────────────────────────────────────────


def test_a_writer_that_only_takes_a_name(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with atomic_file(path) as file:
        assert LEFTOVER.fullmatch(Path(file.name).name)
        Path(file.name).write_bytes(b"by name")
        assert not path.exists()
    assert path.read_bytes() == b"by name"
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(bytes(1 // (1 - file.write(b"h"))))
    assert path.read_bytes() == b"by name"
    assert only(tmp_path, "x.bin")


def test_room_is_told_also_where_the_size_is_not_known() -> None:
    with pytest.raises(DiskFullError) as caught, cache.room_for(None):
        raise OSError(errno.EDQUOT, "quota")
    assert (caught.value.errno, caught.value.required, caught.value.available) == (errno.EDQUOT, None, None)
    assert str(caught.value) == f"[Errno {errno.EDQUOT}] {os.strerror(errno.EDQUOT)}"


def test_write_atomically_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert only(path.parent, "c")
