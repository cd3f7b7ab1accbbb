"""State blobs byte by byte, written here by hand; needs no engine. (test_snapshot.py has the engine's own.)"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll.blob import CELL_EXTENSION_BYTES, MAGIC, Layout, Parts, parse
from swarmkv_ll.errors import BlobError, SnapshotCorruptError

PLAIN = Parts(n_attention=1, recurrent=False, cell_extension=False)


def attention(
    streams: Sequence[Sequence[int]],
    *,
    v_trans: int = 0,
    n_layer: int = 2,
    row: int = 8,
    n_embd: int = 4,
    extension: bool = False,
    n_seq_id: int = 1,
) -> bytes:
    """One attention cache: positions of the cells of each stream, layer after layer of K and V filled with 0xAA."""
    out = struct.pack("<I", len(streams))
    for positions in streams:
        out += struct.pack("<I", len(positions))
        if not positions:
            continue
        for position in positions:
            out += struct.pack("<iI", position, n_seq_id) + b"\x07" * (CELL_EXTENSION_BYTES * extension) + bytes(4)
        out += struct.pack("<II", v_trans, n_layer)
        data = b"\xaa" * (row * len(positions))
        out += n_layer * (struct.pack("<iQ", 1, row) + data)
        out += n_layer * (
            (struct.pack("<iII", 1, row // n_embd, n_embd) if v_trans else struct.pack("<iQ", 1, row)) + data
        )
    return out


def recurrent(n_state: int = 20) -> bytes:
    return struct.pack("<IiI", 1, 41, 0) + b"\xbb" * n_state


def blob(*parts: bytes, magic: int = MAGIC, seq_id: int = 3) -> bytearray:
    return bytearray(struct.pack("<Ii", magic, seq_id) + b"".join(parts))


def read(data: bytes | bytearray, parts: Parts = PLAIN) -> Layout:
    return parse(memoryview(data), parts)


POSITIONS = [0, 1, 2, 5, 4]

GOOD = {
    "attention": (blob(attention([POSITIONS])), PLAIN, 1, False, POSITIONS),
    "transposed": (blob(attention([POSITIONS], v_trans=1)), PLAIN, 1, True, POSITIONS),
    "streams": (blob(attention([[], POSITIONS, []])), PLAIN, 3, False, POSITIONS),
    "empty": (blob(attention([[]])), PLAIN, 1, None, []),
    "extension": (blob(attention([POSITIONS], extension=True)), Parts(1, False, True), 1, False, POSITIONS),
    "windows": (blob(attention([POSITIONS]), attention([[5, 4]])), Parts(2, False, False), 1, False, POSITIONS),
    "recurrent": (blob(recurrent()), Parts(0, True, False), 0, None, [41]),
    "hybrid": (blob(attention([POSITIONS]), recurrent()), Parts(1, True, False), 1, False, POSITIONS),
}


@pytest.mark.parametrize("name", GOOD)
def test_reads_every_layout(name: str) -> None:
    data, parts, n_stream, v_transposed, positions = GOOD[name]
    layout = read(data, parts)
    assert (layout.n_stream, layout.v_transposed) == (n_stream, v_transposed)
    assert layout.positions.tolist() == positions
    assert layout.positions.dtype == np.int32
    layout.check(memoryview(data))


@pytest.mark.parametrize("name", GOOD)
def test_bookkeeping_is_everything_but_the_attention_data(name: str) -> None:
    data, parts, *_ = GOOD[name]
    rest = bytearray(data)
    for offset, kept, field in read(data, parts).bookkeeping:
        assert data[offset : offset + len(kept)] == kept
        assert field
        rest[offset : offset + len(kept)] = b"\xaa" * len(kept)
    assert set(rest) <= {0xAA}


@pytest.mark.parametrize("name", GOOD)
def test_a_blob_of_another_length_is_refused(name: str) -> None:
    """Cut anywhere, or longer; only a recurrent state's own bytes have no length of their own."""
    data, parts, *_ = GOOD[name]
    state = 20 if parts.recurrent else 0
    for n_bytes in range(len(data) - state):
        with pytest.raises(BlobError) as caught:
            read(data[:n_bytes], parts)
        assert caught.value.offset <= n_bytes
        assert "to the end" in str(caught.value)
    if not parts.recurrent:
        with pytest.raises(BlobError, match=r"end of blob should be nothing more, is 1 bytes more"):
            read(data + b"x", parts)


@pytest.mark.parametrize(
    ("data", "offset", "field"),
    [
        (blob(attention([[0]]), magic=1), 0, "magic"),
        (blob(struct.pack("<I", 0)), 8, "n_stream"),
        (blob(struct.pack("<I", 257)), 8, "n_stream"),
        (blob(attention([[0, -1]])), 16, "cell pos"),
        (blob(attention([[3, 3]])), 16, "cell pos"),
        (blob(attention([[3, 4, 3]])), 16, "cell pos"),
        (blob(attention([[0, 1]], n_seq_id=2)), 16, "cell n_seq_id"),
        (blob(attention([[0]], v_trans=2)), 28, "v_trans"),
        (blob(attention([[0]], n_layer=0)), 32, "n_layer"),
        (blob(attention([[0]], n_layer=65537)), 32, "n_layer"),
    ],
)
def test_says_what_is_wrong_and_where(data: bytearray, offset: int, field: str) -> None:
    with pytest.raises(BlobError) as caught:
        read(data)
    assert (caught.value.offset, caught.value.field) == (offset, field)
    assert str(caught.value.actual) in str(caught.value)
    assert str(caught.value.expected) in str(caught.value)


@pytest.mark.parametrize("n_cells", [6, 2**31, 2**32 - 1])
def test_a_count_too_large_is_found_without_reading_on(n_cells: int) -> None:
    data = blob(attention([POSITIONS]))
    struct.pack_into("<I", data, 12, n_cells)
    with pytest.raises(BlobError):
        read(data)


@pytest.mark.parametrize("name", GOOD)
def test_check_finds_the_first_byte_that_differs(name: str) -> None:
    data, parts, *_ = GOOD[name]
    layout = read(data, parts)
    for offset, kept, field in layout.bookkeeping:
        for at in range(offset, offset + len(kept)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            damaged[-1 if parts.recurrent else at] ^= 2
            with pytest.raises(SnapshotCorruptError) as caught:
                layout.check(memoryview(damaged))
            assert (caught.value.offset, caught.value.field) == (at, field)
            assert f"byte {at:,} ({field})" in str(caught.value)


def test_check_passes_over_data() -> None:
    data = blob(attention([POSITIONS]))
    layout = read(data)
    layout.check(memoryview(data.replace(b"\xaa", b"\x00")))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(list(GOOD)), st.booleans())
def test_any_bytes_are_read_or_refused(noise: bytes, name: str, begins_well: bool) -> None:
    """Nothing but a BlobError, and nothing read beyond the end."""
    data, parts, *_ = GOOD[name]
    candidate = bytes(data[: len(data) - len(noise)]) + noise if begins_well else noise
    try:
        layout = read(candidate, parts)
    except BlobError as error:
        assert 0 <= error.offset <= len(candidate)  # noqa: PT017 - both outcomes are right
    else:
        assert all(offset + len(kept) <= len(candidate) for offset, kept, _ in layout.bookkeeping)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(GOOD)), st.integers(0, 2**20), st.integers(1, 255))
def test_one_changed_byte_is_read_or_refused(name: str, at: int, flip: int) -> None:
    data, parts, *_ = GOOD[name]
    changed = bytearray(data)
    changed[at % len(data)] ^= flip
    try:
        read(changed, parts)
    except BlobError as error:
        assert str(error.offset) in str(error)  # noqa: PT017 - both outcomes are right
