"""State blobs byte by byte, written by hand (handmade.py); needs no engine. (test_recast.py has the engine's own.)"""

from __future__ import annotations

import array
import itertools
import mmap
import struct
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from handmade import MAGIC, TYPES, State, every_layout, make_cache, make_recurrent, random_state, row_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll import blob as public
from swarmkv_ll.blob import GGML_TYPES, Layer, Parts, StateBlob, parse, read_layout
from swarmkv_ll.errors import BlobError, InvalidArgumentError, SnapshotCorruptError

EVERY = every_layout()
SOME = [0, 1, 2, 5, 4]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def bits(values: npt.NDArray[Any]) -> bytes:
    return values.tobytes()


def arrays_of(blob: StateBlob) -> list[npt.NDArray[Any]]:
    """Every tensor of a blob."""
    layers = [layer for cache in blob.caches for stream in cache for layer in stream.layers]
    found = [values for layer in layers for values in (layer.k, layer.v) if values is not None]
    return found + ([*blob.recurrent.r, *blob.recurrent.s] if blob.recurrent else [])


# ── what is seen ─────────────────────────────────────────────────────────────────────────────────────


def test_known_bytes_are_seen_as_known_numbers() -> None:
    """Two cells, two layers: f32 and f16 keys, f16 values; nothing in between but what is written here."""
    data = struct.pack("<Ii", 0xAF143CD8, 5)
    data += struct.pack("<II", 1, 2)
    data += struct.pack("<iIi", 10, 1, 5) + struct.pack("<iIi", 11, 1, 5)
    data += struct.pack("<II", 0, 2)
    data += struct.pack("<iQ", 0, 8) + struct.pack("<4f", 1, 2, 3, 4)
    data += struct.pack("<iQ", 1, 4) + struct.pack("<4e", 5, 6, 7, 8)
    data += struct.pack("<iQ", 1, 6) + struct.pack("<6e", 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)
    data += struct.pack("<iQ", 1, 2) + struct.pack("<2e", -1, -2)
    blob = parse(data)
    assert (blob.seq_id, blob.n_stream, blob.v_transposed, blob.n_bytes) == (5, 1, False, len(data))
    assert blob.pos.tolist() == [10, 11]
    assert blob.sequences == {5: 12}
    a, b = blob.layers
    assert (a.k_type, a.v_type, b.k_type, b.v_type) == ("f32", "f16", "f16", "f16")
    assert (a.k.dtype, a.v.dtype) == (np.float32, np.float16)
    assert a.k.tolist() == [[1, 2], [3, 4]]
    assert b.k.tolist() == [[5, 6], [7, 8]]
    assert a.v.tolist() == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]
    assert b.v.tolist() == [[-1], [-2]]
    assert blob.layout.arch is None
    assert blob.recurrent is None


def test_known_bytes_of_a_transposed_v() -> None:
    """Three cells of two values: first all first values, then all second ones."""
    data = struct.pack("<Ii", MAGIC, 0) + struct.pack("<II", 1, 3)
    data += b"".join(struct.pack("<iIi", pos, 1, 0) for pos in (0, 1, 2))
    data += struct.pack("<II", 1, 1)
    data += struct.pack("<iQ", 1, 2) + struct.pack("<3e", 7, 8, 9)
    data += struct.pack("<iII", 0, 4, 2) + struct.pack("<6f", 10, 20, 30, 11, 21, 31)
    (layer,) = parse(data).layers
    assert layer.k.tolist() == [[7], [8], [9]]
    assert layer.v is not None
    assert layer.v.tolist() == [[10, 11], [20, 21], [30, 31]]
    assert parse(data).v_transposed is True


def test_known_bytes_of_a_whole_context() -> None:
    """Two streams, the second empty; then a recurrent memory of two cells, one of them shared."""
    data = struct.pack("<I", 5) + b"jamba"
    data += struct.pack("<I", 2)
    data += struct.pack("<I", 1) + struct.pack("<iIi", 3, 1, 0) + struct.pack("<II", 0, 1)
    data += struct.pack("<iQ", 1, 2) + struct.pack("<e", 0.5)
    data += struct.pack("<iQ", 1, 2) + struct.pack("<e", 0.25)
    data += struct.pack("<I", 0)
    data += struct.pack("<I", 2) + struct.pack("<iIii", 9, 2, 0, 1) + struct.pack("<iIi", 4, 1, 7)
    data += struct.pack("<II", 0, 30)
    data += struct.pack("<iQ", 0, 4) + struct.pack("<2f", 1, 2)
    data += struct.pack("<iQ", 0, 8) + struct.pack("<4f", 3, 4, 5, 6)
    blob = parse(data)
    assert (blob.seq_id, blob.layout.arch, blob.layout.whole, blob.n_stream) == (None, "jamba", True, 2)
    assert blob.layout.parts == Parts(1, True, False)
    assert blob.sequences == {0: 10, 1: 10, 7: 5}
    first, second = blob.caches[0]
    assert first.layers[0].k.tolist() == [[0.5]]
    assert first.layers[0].v.tolist() == [[0.25]]
    assert (len(second.pos), len(second.seq_id), second.layers) == (0, 0, [])
    assert blob.recurrent is not None
    assert blob.recurrent.pos.tolist() == [9, 4]
    assert [r.tolist() for r in blob.recurrent.r] == [[[1], [2]]]
    assert [s.tolist() for s in blob.recurrent.s] == [[[3, 4], [5, 6]]]


@pytest.mark.parametrize("name", EVERY)
def test_views_hold_what_was_put_in(name: str) -> None:
    state = EVERY[name]
    blob = parse(state.encode(), state.parts)
    assert len(blob.caches) == len(state.caches)
    for cache, wanted in zip(blob.caches, state.caches, strict=True):
        assert len(cache) == blob.n_stream == len(wanted.streams)
        for stream, cells in zip(cache, wanted.streams, strict=True):
            assert stream.pos.tolist() == [cell.pos for cell in cells]
            assert stream.seq_id.tolist() == [cell.owners[0] for cell in cells]
            assert stream.pos.dtype == stream.seq_id.dtype == np.int32
            assert stream.cells.n_owners.tolist() == [len(cell.owners) for cell in cells]
            assert stream.cells.owners.tolist() == [owner for cell in cells for owner in cell.owners]
            for owner in range(4):
                held = [i for i, cell in enumerate(cells) if owner in cell.owners]
                assert stream.cells.held_by(owner).tolist() == held
            if cells:
                extension = [list(cell.ext) for cell in cells] if state.extension else None
                found = stream.cells.extension
                assert (None if found is None else found.tolist()) == extension
            assert len(stream.layers) == (len(wanted.k) if cells else 0)
            for i, layer in enumerate(stream.layers):
                kind, n_embd = wanted.k[i]
                assert layer.k_type == kind
                assert layer.k.shape == (len(cells), n_embd if TYPES[kind][1] == 1 else row_bytes(kind, n_embd))
                assert [bits(row) for row in layer.k] == [cell.k[i] for cell in cells]
                if not state.has_v:
                    assert (layer.v, layer.v_type) == (None, "")
                    continue
                kind, n_embd = wanted.v[i]
                assert layer.v is not None
                assert layer.v_type == kind
                assert layer.v.shape == (len(cells), n_embd if TYPES[kind][1] == 1 else row_bytes(kind, n_embd))
                assert [bits(row) for row in layer.v] == [cell.v[i] for cell in cells]
    memory = state.recurrent
    assert (blob.recurrent is None) == (memory is None)
    if blob.recurrent and memory:
        assert blob.recurrent.pos.tolist() == [cell.pos for cell in memory.cells]
        for found, rows, sizes in (
            (blob.recurrent.r, [cell.r for cell in memory.cells], memory.r),
            (blob.recurrent.s, [cell.s for cell in memory.cells], memory.s),
        ):
            assert [values.shape for values in found] == [(len(rows), n // 4) for n in sizes]
            assert all(values.dtype == np.float32 for values in found)
            for i, values in enumerate(found):
                assert [bits(row) for row in values] == [row[i] for row in rows]


@pytest.mark.parametrize("name", EVERY)
def test_what_is_told_about_it(name: str) -> None:
    state = EVERY[name]
    data = state.encode()
    blob = parse(data, state.parts)
    assert (blob.n_bytes, blob.layout.n_bytes, len(blob.data)) == (len(data),) * 3
    assert blob.layout.arch == state.arch
    assert blob.layout.whole == (state.arch is not None)
    assert blob.seq_id == (None if state.arch else state.seq_id)
    assert blob.n_stream == (len(state.caches[0].streams) if state.caches else 0)
    filled = [cache for cache in state.caches if any(cache.streams)]
    assert blob.v_transposed == (filled[0].v_trans if filled else None)
    first = [cell for cells in state.caches[0].streams for cell in cells] if state.caches else state.recurrent.cells
    assert blob.pos.tolist() == [cell.pos for cell in first]
    assert blob.pos.dtype == np.int32
    ends: dict[int, int] = {}
    everyone = [cell for cache in state.caches for cells in cache.streams for cell in cells]
    for cell in [*everyone, *(state.recurrent.cells if state.recurrent else [])]:
        for owner in cell.owners if state.arch else [state.seq_id]:
            ends[owner] = max(ends.get(owner, 0), cell.pos + 1)
    assert blob.sequences == ends
    assert list(blob.sequences) == sorted(ends)
    kinds = [
        None
        if not any(cache.streams)
        else tuple(tuple((TYPES[t][0], row_bytes(t, n)) for t, n in s) for s in (cache.k, cache.v))
        for cache in state.caches
    ]
    memory = state.recurrent and tuple(tuple((0, n) for n in sizes) for sizes in (state.recurrent.r, state.recurrent.s))
    assert blob.layout.shape == (*kinds, memory)
    assert ("context" if state.arch else "sequence") in repr(blob)
    assert f"{len(first)} cells, {len(data):,} bytes" in repr(blob)


def test_layers_are_those_of_the_only_stream_that_holds_cells() -> None:
    for name in ("attention", "streams", "window"):
        layers = parse(EVERY[name].encode()).layers
        assert [bits(layer.k[0]) for layer in layers] == next(s for s in EVERY[name].caches[0].streams if s)[0].k
    for name in ("empty", "recurrent"):
        assert parse(EVERY[name].encode()).layers == []
    with pytest.raises(InvalidArgumentError, match="2 streams hold cells"):
        parse(EVERY["whole streams"].encode()).layers  # noqa: B018


# ── views ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_copied(name: str) -> None:
    """Every tensor is a view; together, and none twice, they are all the bytes that are not bookkeeping."""
    state = EVERY[name]
    data = np.frombuffer(state.encode(), np.uint8).copy()
    blob = parse(data, state.parts)
    assert np.shares_memory(blob.data, data)
    data[state.is_data()] = 0
    views = arrays_of(blob)
    assert all(np.shares_memory(values, data) for values in views if values.size)
    for values in views:
        values.view(np.uint8 if values.dtype.itemsize == 1 else f"u{values.dtype.itemsize}")[...] += 1
    n_ones = sum(values.size for values in views)
    assert int((data[state.is_data()] == 1).sum()) == n_ones
    assert sum(values.nbytes for values in views) == int(state.is_data().sum())


@pytest.mark.parametrize("name", ["attention", "transposed", "mixed types", "hybrid"])
def test_views_are_read_only_where_the_buffer_is(name: str) -> None:
    data = EVERY[name].encode()
    assert not any(values.flags.writeable for values in arrays_of(parse(data)))
    assert all(values.flags.writeable for values in arrays_of(parse(bytearray(data))))
    with pytest.raises(ValueError, match="read-only"):
        arrays_of(parse(data))[0][0] = 0


def test_bookkeeping_is_copied() -> None:
    """Positions and owners stay as they were read; `check` is what notices a change."""
    data = np.frombuffer(EVERY["whole"].encode(), np.uint8).copy()
    blob = parse(data)
    before = (blob.pos.tolist(), blob.sequences)
    data[:] = 0
    assert (blob.pos.tolist(), blob.sequences) == before
    with pytest.raises(SnapshotCorruptError):
        blob.layout.check(data.data)


def mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@pytest.mark.parametrize(
    "buffer",
    [
        bytes,
        bytearray,
        memoryview,
        mapped,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data, np.uint32),
        lambda data: np.frombuffer(data, np.uint8).reshape(2, -1),
        lambda data: memoryview(data).cast("I"),
        lambda data: array.array("B", data),
        lambda data: memoryview(b"xxx" + data)[3:],
    ],
)
def test_any_contiguous_buffer_will_do(buffer: Callable[[bytes], Any]) -> None:
    data = EVERY["attention"].encode()
    assert len(data) % 4 == 0
    held = buffer(data)
    blob = parse(held)
    assert blob.pos.tolist() == SOME
    assert blob.n_bytes == len(data)
    assert np.shares_memory(blob.data, np.frombuffer(held, np.uint8))


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(100, np.uint8)[::2],
        np.zeros((10, 10), np.uint8)[:, :5],
        np.zeros((10, 10), np.uint8).T,
        memoryview(bytes(100))[::2],
        "text",
        None,
        7,
        [1, 2, 3],
    ],
)
def test_what_is_not_one_is_refused(buffer: object) -> None:
    with pytest.raises(InvalidArgumentError, match="contiguous buffer"):
        parse(buffer)


@pytest.mark.parametrize(
    ("name", "field", "code", "value"),
    [
        ("attention", "magic", "I", 1),
        ("attention", "c0 s0 cell 1 pos", "i", -1),
        ("attention", "c0 s0 cell 1 n_seq_id", "I", 2),
        ("attention", "c0 s0 cell_count", "I", 1000),
        ("attention", "c0 s0 K1 type", "i", 99),
        ("whole", "c0 s0 cell 1 pos", "i", -1),
        ("whole", "c0 s0 cell 2 n_seq_id", "I", 257),
        ("recurrent", "r S1 type", "i", 99),
    ],
)
def test_a_failed_parse_holds_on_to_nothing(name: str, field: str, code: str, value: int) -> None:
    """What is raised refers to the frames it passed through: none of them keeps the bytes, so they can be freed."""
    for parts in (None, EVERY[name].parts):
        for read in (read_layout, parse):
            data = np.frombuffer(changed(name, field, code, value)[0], np.uint8).copy()
            gone = weakref.ref(data)
            with pytest.raises(BlobError) as caught:
                read(data, parts)
            del data
            assert gone() is None
            assert caught.value.field


def test_what_is_seen_can_be_compared_and_kept_in_sets() -> None:
    """By identity: arrays have no one answer to whether they are equal."""
    a, b = (parse(EVERY["hybrid"].encode()) for _ in range(2))
    for one, other in (
        (a.layout, b.layout),
        (a.layout.recurrent, b.layout.recurrent),
        (a.caches[0][0], b.caches[0][0]),
        (a.caches[0][0].cells, b.caches[0][0].cells),
        (a.layers[0], b.layers[0]),
        (a.recurrent, b.recurrent),
    ):
        assert one == one
        assert one != other
        assert len({one, other}) == 2


def test_a_layout_holds_no_view() -> None:
    data = np.frombuffer(EVERY["whole hybrid"].encode(), np.uint8).copy()
    gone = weakref.ref(data)
    layout = read_layout(data)
    assert layout.positions.tolist() == [0, 1, 1, 2, 3]
    del data
    assert gone() is None
    assert layout.sequences == {0: 4, 1: 3, 2: 3}


# ── which parts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EVERY)
def test_parts_are_guessed(name: str) -> None:
    """Without being told, every byte is explained in the same way, as far as there are cells to tell from."""
    state = EVERY[name]
    data = state.encode()
    given_parts, guessed = parse(data, state.parts), parse(data)
    if any(cells for cache in state.caches for cells in cache.streams) or not state.caches:
        assert guessed.layout.parts == state.parts
    assert guessed.layout.shape[: len(state.caches)] == given_parts.layout.shape[: len(state.caches)]
    assert guessed.layout.bookkeeping == given_parts.layout.bookkeeping
    assert guessed.pos.tolist() == given_parts.pos.tolist()
    assert guessed.sequences == given_parts.sequences
    assert [bits(a) for a in arrays_of(guessed)] == [bits(a) for a in arrays_of(given_parts)]


def test_a_wrong_guess_is_told_by_the_error_that_came_furthest() -> None:
    state = EVERY["hybrid, window"]
    at = state.offsets()["r S1 type"]
    data = bytearray(state.encode())
    data[at] = 99
    for parts in (None, state.parts):
        with pytest.raises(BlobError) as caught:
            parse(data, parts)
        assert (caught.value.offset, caught.value.actual) == (at, 99)


KINDS = ("attention", "window", "recurrent", "hybrid", "hybrid, window", "extension", "without V")


@pytest.mark.parametrize(("name", "other"), list(itertools.permutations(KINDS, 2)))
def test_given_parts_are_kept_to(name: str, other: str) -> None:
    with pytest.raises(BlobError):
        parse(EVERY[name].encode(), EVERY[other].parts)


# ── what is wrong, and where ─────────────────────────────────────────────────────────────────────────


def changed(name: str, field: str, code: str, *values: int) -> tuple[bytearray, int]:
    """A layout's bytes with other values in a field, and where that is."""
    state = EVERY[name]
    data, at = bytearray(state.encode()), state.offsets()[field]
    struct.pack_into("<" + code, data, at, *values)
    return data, at


@pytest.mark.parametrize(
    ("name", "where", "code", "value", "field", "expected", "actual"),
    [
        ("attention", "magic", "I", 0, "magic", "0xaf143cd8, or an architecture's length", "0x0"),
        ("attention", "magic", "I", 65, "magic", "0xaf143cd8, or an architecture's length", "0x41"),
        ("attention", "magic", "I", MAGIC + 1, "magic", "0xaf143cd8, or an architecture's length", hex(MAGIC + 1)),
        ("attention", "seq_id", "i", -1, "seq_id", "0 to 255", -1),
        ("attention", "seq_id", "i", 256, "seq_id", "0 to 255", 256),
        ("whole", "arch", "B", 0, "architecture", "a printable name", b"\0lama"),
        ("whole", "arch", "B", 10, "architecture", "a printable name", b"\nlama"),
        ("whole", "arch", "B", 0xE9, "architecture", "a printable name", b"\xe9lama"),
        ("attention", "c0 n_stream", "I", 0, "n_stream", "1 to 256", 0),
        ("attention", "c0 n_stream", "I", 257, "n_stream", "1 to 256", 257),
        ("attention", "c0 s0 cell 1 pos", "i", -1, "stream 0 cell 1 pos", "0 to 2,147,483,646", -1),
        ("attention", "c0 s0 cell 1 pos", "i", 2**31 - 1, "stream 0 cell 1 pos", "0 to 2,147,483,646", 2**31 - 1),
        ("attention", "c0 s0 cell 2 pos", "i", 1, "stream 0 cell 2 pos", "each position once a sequence", "1 twice"),
        ("attention", "c0 s0 cell 4 pos", "i", 0, "stream 0 cell 4 pos", "each position once a sequence", "0 twice"),
        ("attention", "c0 s0 cell 3 n_seq_id", "I", 0, "stream 0 cell 3 n_seq_id", 1, 0),
        ("attention", "c0 s0 cell 3 n_seq_id", "I", 2, "stream 0 cell 3 n_seq_id", 1, 2),
        ("attention", "c0 s0 cell 3 n_seq_id", "I", 2**32 - 1, "stream 0 cell 3 n_seq_id", 1, 2**32 - 1),
        ("extension", "c0 s0 cell 3 n_seq_id", "I", 0, "stream 0 cell 3 n_seq_id", 1, 0),
        ("attention", "c0 s0 cell 3 seq_id 0", "i", -1, "stream 0 cell 3 seq_id", "0 to 255", -1),
        ("attention", "c0 s0 cell 3 seq_id 0", "i", 256, "stream 0 cell 3 seq_id", "0 to 255", 256),
        ("extension", "c0 s0 cell 3 seq_id 0", "i", 256, "stream 0 cell 3 seq_id", "0 to 255", 256),
        ("attention", "c0 s0 v_trans", "I", 2, "v_trans", "0 to 1", 2),
        ("attention", "c0 s0 n_layer", "I", 0, "n_layer", "1 to 512", 0),
        ("attention", "c0 s0 n_layer", "I", 513, "n_layer", "1 to 512", 513),
        ("window", "c1 n_stream", "I", 2, "n_stream", "1, as in the first cache", 2),
        ("window", "c1 s0 v_trans", "I", 1, "v_trans", "0, as in the cells before", 1),
        ("window", "c1 s0 n_layer", "I", 513, "n_layer", "0 to 512", 513),
        ("whole", "c0 s0 cell 0 n_seq_id", "I", 0, "stream 0 cell 0 n_seq_id", "1 to 256, all there", 0),
        ("whole", "c0 s0 cell 2 n_seq_id", "I", 257, "stream 0 cell 2 n_seq_id", "1 to 256, all there", 257),
        ("whole", "c0 s0 cell 2 n_seq_id", "I", 2**31, "stream 0 cell 2 n_seq_id", "1 to 256, all there", 2**31),
        ("whole", "c0 s0 cell 2 pos", "i", -7, "stream 0 cell 2 pos", "0 to 2,147,483,646", -7),
        ("whole", "c0 s0 cell 0 seq_id 2", "i", -1, "stream 0 cell 0 seq_id", "0 to 255", -1),
        ("whole", "c0 s0 cell 2 seq_id 1", "i", 256, "stream 0 cell 2 seq_id", "0 to 255", 256),
        ("whole streams", "c0 s2 cell 1 seq_id 0", "i", 1, "stream 2 cell 1 seq_id", "2, as of each cell of its stream", 1),
        ("whole streams", "c0 s2 v_trans", "I", 1, "v_trans", "0, as in the cells before", 1),
        ("whole streams", "c0 s2 n_layer", "I", 1, "n_layer", "2, as in the stream before", 1),
        ("recurrent", "r cell_count", "I", 2, "recurrent cell_count", "0 to 1", 2),
        ("recurrent", "r cell 0 pos", "i", -1, "recurrent cell 0 pos", "0 to 2,147,483,646", -1),
        ("recurrent", "r cell 0 n_seq_id", "I", 1, "recurrent cell 0 n_seq_id", "0 to 0", 1),
        ("recurrent", "r s_trans", "I", 1, "recurrent s_trans", "0 to 0", 1),
        ("recurrent", "r n_layer", "I", 0, "recurrent n_layer", "1 to 512", 0),
        ("recurrent", "r n_layer", "I", 513, "recurrent n_layer", "1 to 512", 513),
        ("whole recurrent", "r cell_count", "I", 257, "recurrent cell_count", "0 to 256", 257),
        ("whole recurrent", "r cell 1 n_seq_id", "I", 0, "recurrent cell 1 n_seq_id", "1 to 256", 0),
        ("whole recurrent", "r cell 0 n_seq_id", "I", 257, "recurrent cell 0 n_seq_id", "1 to 256", 257),
        ("whole recurrent", "r cell 0 seq_id 1", "i", 256, "recurrent cell 0 seq_id", "0 to 255", 256),
    ],
)  # fmt: skip
def test_says_what_is_wrong_and_where(
    name: str, where: str, code: str, value: int, field: str, expected: object, actual: object
) -> None:
    data, at = changed(name, where, code, value)
    with pytest.raises(BlobError) as caught:
        parse(data, EVERY[name].parts)
    assert (caught.value.offset, caught.value.field) == (at, field)
    assert caught.value.expected == (f"{expected:,}" if isinstance(expected, int) and expected > 999 else expected)
    assert caught.value.actual == actual
    assert str(caught.value) == f"state blob, byte {at:,}: {field} should be {caught.value.expected}, is {actual}"


@pytest.mark.parametrize(
    ("name", "tensor", "code", "values", "expected", "actual"),
    [
        ("attention", "K1", "i", (-1,), "one of [0, 1, 2, 3, 6, 7, 8, 20, 30]", -1),
        ("attention", "V0", "i", (24,), "one of [0, 1, 2, 3, 6, 7, 8, 20, 30]", 24),
        ("recurrent", "S1", "i", (40,), "one of [0, 1, 2, 3, 6, 7, 8, 20, 30]", 40),
        ("attention", "K1", "iQ", (1, 0), "1 to 4,294,967,295 and a multiple of 2 (f16)", "0"),
        ("attention", "V1", "iQ", (1, 7), "1 to 4,294,967,295 and a multiple of 2 (f16)", "7"),
        ("attention", "V1", "iQ", (0, 6), "1 to 4,294,967,295 and a multiple of 4 (f32)", "6"),
        ("mixed types", "K0", "iQ", (8, 67), "1 to 4,294,967,295 and a multiple of 34 (q8_0)", "67"),
        ("attention", "K0", "iQ", (1, 2**63 + 1), "1 to 4,294,967,295 and a multiple of 2 (f16)", f"{2**63 + 1:,}"),
        ("recurrent", "R1", "iQ", (0, 10), "0 to 4,294,967,295 and a multiple of 4 (f32)", "10"),
        ("transposed", "V0", "iII", (1, 4, 4), "elements of 2 bytes (f16), 1 or more", "4 of 4"),
        ("transposed", "V0", "iII", (1, 1, 8), "elements of 2 bytes (f16), 1 or more", "8 of 1"),
        ("transposed", "V1", "iII", (1, 2, 0), "elements of 2 bytes (f16), 1 or more", "0 of 2"),
        ("transposed", "V1", "iII", (1, 0, 3), "elements of 2 bytes (f16), 1 or more", "3 of 0"),
        ("transposed", "V1", "iII", (8, 34, 1), "elements of 34 bytes (q8_0), 1 or more", "1 of 34"),
        ("transposed", "V1", "iII", (1, 2**32 - 1, 2**32 - 1), "elements of 2 bytes (f16), 1 or more",
         "4,294,967,295 of 4,294,967,295"),
        ("attention", "K0", "iQ", (1, 2**63), "1 to 4,294,967,295 and a multiple of 2 (f16)", f"{2**63:,}"),
        ("attention", "V1", "iQ", (1, 2**64 - 2), "1 to 4,294,967,295 and a multiple of 2 (f16)", f"{2**64 - 2:,}"),
        ("attention", "V1", "iQ", (1, 2**32 + 6), "1 to 4,294,967,295 and a multiple of 2 (f16)", f"{2**32 + 6:,}"),
        ("recurrent empty", "R0", "iQ", (0, 2**32), "0 to 4,294,967,295 and a multiple of 4 (f32)", f"{2**32:,}"),
        ("transposed", "V1", "iII", (1, 2, 2**32 - 1), "elements of 2 bytes (f16), 1 or more", "4,294,967,295 of 2"),
        ("transposed", "V1", "iII", (1, 2, 2**31), "elements of 2 bytes (f16), 1 or more", "2,147,483,648 of 2"),
        ("attention", "K0", "iQ", (1, 2**32 - 2), f"{(2**32 - 2) * 5:,} bytes", None),
        ("attention", "K0", "iQ", (1, 2**31), f"{2**31 * 5:,} bytes", None),
        ("attention", "V1", "iQ", (1, 8), "40 bytes", None),
        ("transposed", "V1", "iII", (1, 2, 2**31 - 1), f"{(2**32 - 2) * 5:,} bytes", None),
        ("transposed", "V1", "iII", (1, 2, 4), "40 bytes", None),
        ("recurrent", "S1", "iQ", (0, 2**31), f"{2**31:,} bytes", None),
    ],
)  # fmt: skip
def test_says_which_tensor_is_wrong(
    name: str, tensor: str, code: str, values: tuple[int, ...], expected: str, actual: object
) -> None:
    state = EVERY[name]
    at = {"K": "c0 s0 ", "V": "c0 s0 ", "R": "r ", "S": "r "}[tensor[0]] + tensor
    data, offset = changed(name, f"{at} type", code, *values)
    index = int(tensor[1]) + (2 if tensor[0] == "S" else 0)
    title = f"recurrent tensor {index}" if tensor[0] in "RS" else f"cache 0 {tensor[0]} of layer {index}"
    what, offset = ("type", offset) if code == "i" else ("row size", offset + 4)
    if actual is None:
        what, offset = "data", state.offsets()[f"{at} data"]
        actual = f"{len(data) - offset:,} bytes to the end"
    with pytest.raises(BlobError) as caught:
        parse(data, state.parts)
    assert (caught.value.offset, caught.value.field) == (offset, f"{title}: {what}")
    assert (caught.value.expected, caught.value.actual) == (expected, actual)


def refused(state: State, where: str, field: str) -> BlobError:
    """Refused, with parts given and guessed; at that place if they are given."""
    with pytest.raises(BlobError):
        parse(state.encode())
    with pytest.raises(BlobError) as caught:
        parse(state.encode(), state.parts)
    assert caught.value.offset == state.offsets()[where]
    assert field in caught.value.field
    return caught.value


def test_a_sequence_stands_in_one_stream() -> None:
    """The engine would put the second stream's cells into the sequence after the first's, and lose those."""
    error = refused(State([make_cache(rng(), [[0, 1], [], [2]])]), "c0 s2 cell_count", "stream 2 cell_count")
    assert (error.expected, error.actual) == ("0, as another stream has the sequence", 1)


def test_streams_have_the_same_layers() -> None:
    for other, what in (
        ((("f16", 4), ("f16", 4)), "K1"),
        ((("f16", 4), ("bf16", 3)), "K1"),
    ):
        state = State([make_cache(rng(), [[0], [1], [2]], owner=None)], arch="llama")
        odd = State([make_cache(rng(), [[0], [1], [2]], owner=None, k=other)], arch="llama")
        data = bytearray(state.encode())
        at, end = state.offsets()["c0 s2 cell_count"], odd.offsets()["c0 s2 cell_count"]
        data[at:] = odd.encode()[end:]
        with pytest.raises(BlobError) as caught:
            parse(data, state.parts)
        wanted = odd.offsets()[f"c0 s2 {what} type"] - end + at
        assert (caught.value.offset, caught.value.field) == (wanted, "cache 0 K of layer 1: type and size")
        assert "as in the stream before" in str(caught.value)


def test_both_caches_have_as_many_streams() -> None:
    state = State([make_cache(rng(), [[0], []]), make_cache(rng(), [[0], [], []])])
    error = refused(state, "c1 n_stream", "n_stream")
    assert (error.expected, error.actual) == ("2, as in the first cache", 3)


def test_one_attention_cache_has_layers() -> None:
    """Only where a window is on all layers, or on none, is one of two caches without any."""
    refused(State([make_cache(rng(), [[0, 1]], k=())]), "c0 s0 n_layer", "n_layer")


def test_a_sequence_holds_a_position_once() -> None:
    """In a whole context's blob several may stand at the same position, but no cell or two belong to one twice."""
    shared = [(0, [0, 1]), (0, [2]), (1, [1, 0])]
    assert parse(State([make_cache(rng(), [shared])], arch="a").encode()).sequences == {0: 2, 1: 2, 2: 1}
    for cells, cell in (
        ([(0, [0, 1]), (1, [1]), (0, [2, 1])], 2),
        ([(5, [0]), (4, [1, 1])], 1),
    ):
        state = State([make_cache(rng(), [cells])], arch="a")
        error = refused(state, f"c0 s0 cell {cell} pos", f"cell {cell} pos")
        assert error.actual == f"{cells[cell][0]} twice"


def test_cells_of_a_picture_share_their_position() -> None:
    """With M-RoPE a position is three numbers."""
    state = State([make_cache(rng(), [[0, 1, 1, 1, 2]])], extension=True)
    cells = state.caches[0].streams[0]
    for cell, ext in zip(cells, [(0, 0, 9), (1, 1, 0), (2, 1, 0), (1, 2, 0), (3, 3, 8)], strict=True):
        cell.ext = ext
    assert parse(state.encode()).pos.tolist() == [0, 1, 1, 1, 2]
    cells[3].ext = (2, 1, 5)  # the token does not tell them apart
    refused(state, "c0 s0 cell 3 pos", "cell 3 pos")


def test_a_recurrent_state_is_a_sequences_only_one() -> None:
    state = State([], make_recurrent(rng(), [(4, [0, 2]), (7, [2])]), arch="a")
    error = refused(state, "r cell 1 seq_id 0", "recurrent cell seq_id")
    assert (error.expected, error.actual) == ("each sequence once", [0, 2, 2])


@pytest.mark.parametrize(("r", "s"), [((12, 12), (20,)), ((12,), (20, 20)), ((12,), ()), ((), (12,)), ((), ())])
def test_there_are_as_many_r_as_s(r: tuple[int, ...], s: tuple[int, ...]) -> None:
    for recurrent_cells in ([], [(5, [])]):
        state = State([], make_recurrent(rng(), recurrent_cells, r=r, s=s))
        with pytest.raises(BlobError) as caught:
            parse(state.encode(), state.parts)
        assert caught.value.field == "recurrent tensors"
        assert (caught.value.expected, caught.value.actual) == ("as many R as S, not none", len(r) + len(s))


def test_there_are_no_more_recurrent_tensors_than_layers() -> None:
    state = State([], make_recurrent(rng(), r=(4,) * 3, s=(8,) * 3))
    state.recurrent.n_layer = 3
    assert len(parse(state.encode()).recurrent.r) == 3
    state.recurrent.n_layer = 2
    error = refused(state, "r S1 type", "end of blob")
    assert error.expected == "nothing more"


# ── lengths ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EVERY)
def test_a_blob_of_another_length_is_refused(name: str) -> None:
    """Cut anywhere, or longer. Only a recurrent state does not say how many layers it has: half of them look whole."""
    state = EVERY[name]
    data = state.encode()
    looks_whole = state.offsets()["r S0 type"] if state.recurrent else None
    for n_bytes in range(len(data)):
        if n_bytes == looks_whole:
            assert len(parse(data[:n_bytes], state.parts).layout.recurrent.r) == 1
            continue
        with pytest.raises(BlobError) as caught:
            parse(data[:n_bytes], state.parts)
        assert caught.value.offset <= n_bytes
        if "recurrent tensors" not in str(caught.value):
            assert "to the end" in str(caught.value) or "all there" in str(caught.value)
    with pytest.raises(BlobError) as caught:
        parse(data + b"x", state.parts)
    if state.recurrent:
        assert caught.value.actual == "1 bytes to the end"
    else:
        assert (
            str(caught.value) == f"state blob, byte {len(data):,}: end of blob should be nothing more, is 1 bytes more"
        )


@pytest.mark.parametrize("name", ["attention", "hybrid, window"])
def test_cut_anywhere_it_is_refused_without_parts_too(name: str) -> None:
    data = EVERY[name].encode()
    whole = {EVERY[name].offsets()["r S0 type"]} if EVERY[name].recurrent else set()
    for n_bytes in set(range(len(data))) - whole:
        try:
            guessed = parse(data[:n_bytes])
        except BlobError as error:
            assert error.offset <= n_bytes  # noqa: PT017 - one of two right outcomes
        else:  # a piece can be a blob of another kind
            assert guessed.layout.parts != EVERY[name].parts


def test_cells_may_be_most_of_a_blob() -> None:
    """How many bytes they take is known to the byte."""
    state = State([make_cache(rng(), [range(200)], k=(("f16", 1),), v=())], has_v=False)
    assert len(state.encode()) < 1.25 * 200 * 12
    assert len(parse(state.encode()).pos) == 200
    data = bytearray(state.encode()[: state.offsets()["c0 s0 v_trans"]])
    with pytest.raises(BlobError, match="v_trans should be 4 bytes, is 0 bytes to the end"):
        parse(data, state.parts)
    with pytest.raises(BlobError, match="stream 0 cells should be at least 2,400 bytes, is 2,399 bytes to the end"):
        parse(data[:-1], state.parts)


def test_an_empty_buffer_is_no_blob() -> None:
    for nothing in (b"", bytearray(), np.empty(0, np.uint8), memoryview(b"")):
        with pytest.raises(BlobError) as caught:
            parse(nothing)
        assert (caught.value.offset, caught.value.field, caught.value.actual) == (0, "magic", "0 bytes to the end")


@pytest.mark.parametrize("n_cells", [6, 1000, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("name", ["attention", "extension", "whole"])
def test_a_count_too_large_is_found_without_reading_on(name: str, n_cells: int) -> None:
    data, at = changed(name, "c0 s0 cell_count", "I", n_cells)
    with pytest.raises(BlobError) as caught:
        parse(data, EVERY[name].parts)
    assert caught.value.offset >= at
    if n_cells > 6:
        fixed = 24 if name == "extension" else 12
        assert (caught.value.offset, caught.value.expected) == (at + 4, f"at least {fixed * n_cells:,} bytes")
        assert caught.value.actual == f"{len(data) - at - 4:,} bytes to the end"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that Python and numpy held at once for it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def large(**options: Any) -> bytes:
    """4 MB of 500 cells."""
    return State([make_cache(rng(), [range(500)], k=(("f16", 512),) * 4, **options)]).encode()


@pytest.mark.parametrize("v_trans", [False, True])
def test_reading_takes_memory_for_the_bookkeeping_only(v_trans: bool) -> None:
    data = large(v_trans=v_trans)
    assert len(data) > 4_000_000
    assert peak_of(lambda: parse(data)) < 100_000
    blob = parse(data)
    assert peak_of(lambda: arrays_of(blob)) < 100_000


@pytest.mark.parametrize("name", EVERY)
def test_hostile_numbers_take_no_memory(name: str) -> None:
    """Whatever a count says, no more is made than the buffer has room for."""
    state = EVERY[name]
    data = state.encode()
    for at in range(0, len(data) - 4, 15):
        for value in (2**31 - 1, 2**32 - 1):
            hostile = bytearray(data)
            struct.pack_into("<I", hostile, at, value)

            def look(hostile: bytearray = hostile) -> None:
                with suppress(BlobError):
                    parse(hostile, state.parts)

            assert peak_of(look) < 50_000, (at, value)


def test_repetitive_bytes_take_memory_in_proportion() -> None:
    """Bytes that read as cells, owners, layers or states, as far as they go."""
    n = 1 << 15
    head = struct.pack("<Ii", MAGIC, 0)
    whole = struct.pack("<I", 1) + b"a"
    layers = struct.pack("<II", 0, 512) + 1024 * (struct.pack("<iQ", 1, 2) + b"xx")
    streams = b"".join(struct.pack("<IiIi", 1, 0, 1, s) + layers for s in range(3))
    for name, data in {
        "zeros": bytes(n),
        "ones": b"\1" * n,
        "twos": struct.pack("<I", 2) * (n // 4),
        "cells": head + struct.pack("<II", 1, n // 12) + struct.pack("<iIi", 0, 1, 0) * (n // 12),
        "shared cells": whole + struct.pack("<II", 1, n // 16) + struct.pack("<iIii", 0, 2, 0, 1) * (n // 16),
        "owners": whole + struct.pack("<II", 1, n // 1032) + (struct.pack("<iI", 0, 256) + bytes(1024)) * (n // 1032),
        "streams": whole + struct.pack("<I", 256) + streams,
        "states": head + struct.pack("<III", 0, 0, 512) + struct.pack("<iQ", 0, 0) * (n // 12),
    }.items():
        for parts in (None, Parts(1, False, False), Parts(0, True, False)):

            def look(data: bytes = data, parts: Parts | None = parts) -> None:
                with pytest.raises(BlobError):
                    parse(data, parts)

            assert peak_of(look) < 30 * len(data), (name, parts)


# ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EVERY)
def test_bookkeeping_is_everything_but_the_tensors_data(name: str) -> None:
    state = EVERY[name]
    data = state.encode()
    layout = parse(data, state.parts).layout
    found = np.zeros(len(data), int)
    for offset, kept, field in layout.bookkeeping:
        assert data[offset : offset + len(kept)] == kept
        assert field
        found[offset : offset + len(kept)] += 1
    assert found.tolist() == (~state.is_data()).astype(int).tolist()
    assert [offset for offset, *_ in layout.bookkeeping] == sorted(offset for offset, *_ in layout.bookkeeping)
    layout.check(memoryview(data))


@pytest.mark.parametrize("name", ["attention", "transposed", "streams", "hybrid, window", "whole", "whole recurrent"])
def test_check_finds_the_first_byte_that_differs(name: str) -> None:
    data = EVERY[name].encode()
    layout = parse(data).layout
    last = max(offset + len(kept) for offset, kept, _ in layout.bookkeeping) - 1
    for offset, kept, field in layout.bookkeeping:
        for at in range(offset, offset + len(kept)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            damaged[last] ^= 2
            with pytest.raises(SnapshotCorruptError) as caught:
                layout.check(memoryview(damaged))
            assert (caught.value.offset, caught.value.field) == (at, field)
            assert f"byte {at:,} ({field})" in str(caught.value)


@pytest.mark.parametrize("name", EVERY)
def test_check_passes_over_data(name: str) -> None:
    state = EVERY[name]
    data = np.frombuffer(state.encode(), np.uint8).copy()
    layout = parse(data, state.parts).layout
    data[state.is_data()] ^= 255
    layout.check(data.data)


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────


def read_or_refused(data: bytes | bytearray, parts: Parts | None) -> None:
    """Nothing but a BlobError; and what is read can be looked at."""
    try:
        blob = parse(data, parts)
    except BlobError as error:
        assert 0 <= error.offset <= len(data)  # noqa: PT017 - both outcomes are right
        return
    assert all(offset + len(kept) <= len(data) for offset, kept, _ in blob.layout.bookkeeping)
    n_data = len(data) - sum(len(kept) for _, kept, _ in blob.layout.bookkeeping)
    assert sum(values.nbytes for values in arrays_of(blob)) == n_data
    assert all(end >= 1 for end in blob.sequences.values())
    assert repr(blob)
    assert blob.layout.shape


NAMES = st.sampled_from(list(EVERY))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), NAMES, st.sampled_from(["noise", "head", "tail"]), st.booleans())
def test_any_bytes_are_read_or_refused(noise: bytes, name: str, how: str, told: bool) -> None:
    data = EVERY[name].encode()
    kept = max(0, len(data) - len(noise))
    candidate = {"noise": noise, "head": data[:kept] + noise, "tail": data[:8] + noise}[how]
    read_or_refused(candidate, EVERY[name].parts if told else None)


@settings(max_examples=300, deadline=None)
@given(NAMES, st.integers(0, 2**20), st.integers(1, 255), st.booleans())
def test_one_changed_byte_is_read_or_refused(name: str, at: int, flip: int, told: bool) -> None:
    data = bytearray(EVERY[name].encode())
    data[at % len(data)] ^= flip
    read_or_refused(data, EVERY[name].parts if told else None)


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES, st.integers(0, 2**20), st.integers(0, 2**20), st.booleans())
def test_spliced_blobs_are_read_or_refused(name: str, other: str, cut: int, begin: int, told: bool) -> None:
    head, tail = EVERY[name].encode(), EVERY[other].encode()
    read_or_refused(head[: cut % len(head)] + tail[begin % len(tail) :], EVERY[name].parts if told else None)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_state_is_read_as_it_is(seed: int) -> None:
    state = random_state(rng(seed))
    blob = parse(state.encode(), state.parts)
    assert [s.pos.tolist() for cache in blob.caches for s in cache] == [
        [cell.pos for cell in cells] for cache in state.caches for cells in cache.streams
    ]
    for cache, wanted in zip(blob.caches, state.caches, strict=True):
        for stream, cells in zip(cache, wanted.streams, strict=True):
            for i, layer in enumerate(stream.layers):
                assert [bits(row) for row in layer.k] == [cell.k[i] for cell in cells]
                assert layer.v is None or [bits(row) for row in layer.v] == [cell.v[i] for cell in cells]
    read_or_refused(state.encode(), None)


# ── float32 ──────────────────────────────────────────────────────────────────────────────────────────


def one_layer(kind: str, keys: bytes, n_embd: int, n_cells: int, *, v_trans: bool = False) -> Layer:
    """A layer with the same rows as keys and values."""
    state = State([make_cache(rng(), [range(n_cells)], k=((kind, n_embd),), v_trans=v_trans)])
    size = row_bytes(kind, n_embd)
    for i, cell in enumerate(state.caches[0].streams[0]):
        cell.k = cell.v = [keys[i * size : (i + 1) * size]]
    return parse(state.encode()).layers[0]


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize(("n_cells", "n_embd"), [(1, 1), (7, 5), (3, 64)])
def test_floats_as_float32(n_cells: int, n_embd: int, v_trans: bool) -> None:
    values = rng().standard_normal((n_cells, n_embd)).astype(np.float32)
    values.flat[-1] = np.inf
    upper_half = (values.view(np.uint32) >> 16).astype(np.uint16)
    for kind, stored, wanted in (
        ("f32", values, values),
        ("f16", values.astype(np.float16), values.astype(np.float16).astype(np.float32)),
        ("bf16", upper_half, (upper_half.astype(np.uint32) << 16).view(np.float32)),
    ):
        layer = one_layer(kind, stored.tobytes(), n_embd, n_cells, v_trans=v_trans)
        assert layer.k.dtype == stored.dtype
        for found in layer.dequantize():
            assert found is not None
            assert (found.dtype, found.shape) == (np.float32, (n_cells, n_embd))
            assert np.array_equal(found, wanted)
            assert not np.shares_memory(found, layer._data)
    assert np.allclose(wanted, values, rtol=1 / 128)  # bf16 keeps eight bits


@pytest.mark.parametrize("kind", [kind for kind, (_, block, _) in TYPES.items() if block > 1])
def test_quantized_types_as_float32(kind: str) -> None:
    """As gguf does it; and what gguf has quantized comes back nearly."""
    gguf = pytest.importorskip("gguf")
    values = rng().standard_normal((6, 64)).astype(np.float32)
    number = gguf.GGMLQuantizationType(TYPES[kind][0])
    try:
        rows = gguf.quants.quantize(values, number)
    except NotImplementedError:  # only read
        rows = np.frombuffer(rng().bytes(6 * row_bytes(kind, 64)), np.uint8).reshape(6, -1).copy()
        rows.reshape(-1, TYPES[kind][2])[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)  # the scale
        values = gguf.quants.dequantize(rows, number)
    layer = one_layer(kind, rows.tobytes(), 64, 6)
    assert layer.k.shape == (6, row_bytes(kind, 64))
    for found in layer.dequantize():
        assert found is not None
        assert (found.dtype, found.shape) == (np.float32, (6, 64))
        assert np.array_equal(found, gguf.quants.dequantize(rows, number))
        assert np.abs(found - values).max() < 0.5
        assert np.ptp(found) > 1


def test_keys_alone_as_float32() -> None:
    keys, values = parse(EVERY["without V"].encode()).layers[0].dequantize()
    assert keys.shape == (5, 4)
    assert values is None


# ── the numbers themselves ───────────────────────────────────────────────────────────────────────────


def test_types_are_the_engines() -> None:
    gguf = pytest.importorskip("gguf")
    assert {kind.name: (number, kind.block, kind.n_bytes) for number, kind in GGML_TYPES.items()} == TYPES
    for name, numbers in TYPES.items():
        number = gguf.GGMLQuantizationType[name.upper()]
        assert (int(number), *gguf.GGML_QUANT_SIZES[number]) == numbers
    for kind in GGML_TYPES.values():
        assert (kind.dtype is None) == (kind.block > 1)
        assert kind.dtype is None or np.dtype(kind.dtype).itemsize == kind.n_bytes


def test_all_is_there() -> None:
    assert all(hasattr(public, name) for name in public.__all__)
