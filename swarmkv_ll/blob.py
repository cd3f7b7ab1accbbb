"""What a sequence's state blob is, byte by byte. Pure numpy; needs no engine.

The engine writes little-endian fields without padding (read in `src/llama-kv-cache.cpp` and
`src/llama-memory-recurrent.cpp` of the pinned source):

======================  ==========================================================================================
head                    magic u32, seq_id i32
an attention cache      n_stream u32, then for each stream: cell_count u32, and if it is not 0:
                        for each cell pos i32, n_seq_id u32, [extension, 12 bytes], seq_id i32 × n_seq_id;
                        v_trans u32, n_layer u32;
                        for each layer K: type i32, row_size u64, row_size × cell_count bytes;
                        for each layer V: the same, or, if v_trans, type i32, el_size u32, n_embd u32,
                        el_size × n_embd × cell_count bytes
a recurrent memory      cell_count u32; for each cell pos i32, n_seq_id u32; then tensors (not taken apart here)
======================  ==========================================================================================

A model with one attention cache has one such part; with a sliding window two (the full layers', then the windowed
layers'); a recurrent model has the recurrent part only; a hybrid one the attention part, then the recurrent one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import BlobError, SnapshotCorruptError

MAGIC = 0xAF143CD8
"""First field of a sequence's blob (`io_magic` in `src/llama-context.cpp`)."""

_TENSOR_HEAD = struct.Struct("<iII")

CELL_EXTENSION_BYTES = 12
"""Size of `llama_kv_cell_ext`: x, y, token."""


@dataclass(frozen=True)
class Parts:
    """Which memories a model's blob is made of."""

    n_attention: int
    recurrent: bool
    cell_extension: bool


@dataclass(frozen=True)
class Layout:
    """Where a blob's bookkeeping stands, and what it says.

    Attributes
    ----------
    n_stream : int
        Streams of the first attention cache, 0 without one.
    v_transposed : bool or None
        Whether V is stored transposed; None without an attention cache.
    positions : ndarray of int32, shape (n_cells,)
        Position of each cell of the first attention cache, or of the recurrent memory without one.
    bookkeeping : tuple of (offset, bytes, field)
        Every byte that is not tensor data, as the engine wrote it.
    """

    n_stream: int
    v_transposed: bool | None
    positions: npt.NDArray[np.int32]
    bookkeeping: tuple[tuple[int, bytes, str], ...]

    def check(self, data: memoryview) -> None:
        """Check that the bookkeeping in `data` is byte for byte what the engine wrote.

        The engine's own checks let damage through that spoils a context for good (a negative position, a count
        too large), so a blob is handed back to it only if they could not have anything to find.

        Raises
        ------
        SnapshotCorruptError
            The first byte that differs, and the field it belongs to.
        """
        for offset, wanted, field in self.bookkeeping:
            found = bytes(data[offset : offset + len(wanted)])
            if found != wanted:
                at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
                raise SnapshotCorruptError(offset + at, field)


class _Reader:
    """Reads bookkeeping fields in order, remembers them, and skips tensor data; never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0
        self.seen: list[tuple[int, bytes, str]] = []

    def take(self, n_bytes: int, field: str) -> bytes:
        self._need(n_bytes, field)
        found = bytes(self.data[self.offset : self.offset + n_bytes])
        self.seen.append((self.offset, found, field))
        self.offset += n_bytes
        return found

    def number(self, code: str, field: str) -> int:
        fmt = "<" + code
        return int(struct.unpack(fmt, self.take(struct.calcsize(fmt), field))[0])

    def expect(self, actual: int, expected: object, field: str, ok: bool) -> None:
        if not ok:
            raise BlobError(self.seen[-1][0], field, expected, actual)

    def _need(self, n_bytes: int, field: str) -> None:
        left = len(self.data) - self.offset
        if n_bytes > left:
            raise BlobError(self.offset, field, f"{n_bytes:,} bytes", f"{left:,} bytes to the end")


def parse(data: memoryview, parts: Parts) -> Layout:
    """Read the bookkeeping of a sequence's blob; tensor data is passed over, not touched.

    Parameters
    ----------
    data : memoryview of uint8, shape (n_bytes,)
        A whole blob. Not copied; the layout keeps copies of the bookkeeping only. Release it afterwards: what is
        raised here refers to it through its traceback.
    parts : Parts
        What the blob's model is made of.

    Raises
    ------
    BlobError
        A field does not hold what it should, or the blob is too short or too long.
    """
    reader = _Reader(data)
    magic = reader.number("I", "magic")
    reader.expect(magic, hex(MAGIC), "magic", magic == MAGIC)
    reader.number("i", "seq_id")

    caches = [_attention(reader, parts.cell_extension) for _ in range(parts.n_attention)]
    n_stream, v_transposed, positions = caches[0] if caches else (0, None, np.empty(0, np.int32))
    if parts.recurrent:
        cell_positions = _recurrent(reader)
        if not caches:
            positions = cell_positions
    left = len(reader.data) - reader.offset
    if left:
        raise BlobError(reader.offset, "end of blob", "nothing more", f"{left:,} bytes more")
    return Layout(n_stream, v_transposed, positions, tuple(reader.seen))


def _attention(reader: _Reader, extension: bool) -> tuple[int, bool | None, npt.NDArray[np.int32]]:
    n_stream = reader.number("I", "n_stream")
    reader.expect(n_stream, "1 to 256", "n_stream", 1 <= n_stream <= 256)
    v_transposed: bool | None = None
    positions = [np.empty(0, np.int32)]
    words = 3 + (CELL_EXTENSION_BYTES // 4 if extension else 0)
    for stream in range(n_stream):
        n_cells = reader.number("I", f"stream {stream} cell_count")
        if n_cells == 0:
            continue
        meta = np.frombuffer(reader.take(4 * words * n_cells, f"stream {stream} cells"), "<i4").reshape(n_cells, words)
        found = meta[:, 0].astype(np.int32)
        reader.expect(int(found.min()), "0 or more", "cell pos", bool(found.min() >= 0))
        if not (found[1:] > found[:-1]).all():  # cells that were reused stand in another order
            n_distinct = len(np.unique(found))
            reader.expect(n_distinct, f"{n_cells} different positions", "cell pos", n_distinct == n_cells)
        one_owner = bool((meta[:, 1] == 1).all())
        reader.expect(int(meta[:, 1].max()), 1, "cell n_seq_id", one_owner)
        positions.append(found)
        v_trans = reader.number("I", "v_trans")
        reader.expect(v_trans, "0 or 1", "v_trans", v_trans in (0, 1))
        v_transposed = bool(v_trans)
        n_layer = reader.number("I", "n_layer")
        reader.expect(n_layer, "1 to 65,536", "n_layer", 1 <= n_layer <= 65536)
        _tensors(reader, "K", n_layer, n_cells, transposed=False)
        _tensors(reader, "V", n_layer, n_cells, transposed=v_transposed)
    return n_stream, v_transposed, np.concatenate(positions)


def _tensors(reader: _Reader, name: str, n_layer: int, n_cells: int, *, transposed: bool) -> None:
    """Every layer's K, or V. In one loop over local names: this is most of what an export costs beside the copy."""
    data, at, end = reader.data, reader.offset, len(reader.data)
    for layer in range(n_layer):
        head = bytes(data[at : at + 12])
        if len(head) < 12:
            raise BlobError(at, f"layer {layer} {name} type and row size", "12 bytes", f"{len(head)} bytes to the end")
        reader.seen.append((at, head, f"layer {layer} {name} type and row size"))
        _, size, n_embd = _TENSOR_HEAD.unpack(head)
        # Transposed: element size and row length; else one u64 row size, whose upper half is 0 in any real cache.
        n_bytes = (size * n_embd if transposed else size | n_embd << 32) * n_cells
        at += 12
        if n_bytes > end - at:
            raise BlobError(at, f"layer {layer} {name} data", f"{n_bytes:,} bytes", f"{end - at:,} bytes to the end")
        at += n_bytes
    reader.offset = at


def _recurrent(reader: _Reader) -> npt.NDArray[np.int32]:
    """The recurrent part, taken as bookkeeping whole: it is small, does not grow, and cannot be cut."""
    n_cells = reader.number("I", "recurrent cell_count")
    meta = reader.take(8 * n_cells, "recurrent cells")
    reader.take(len(reader.data) - reader.offset, "recurrent state")
    return np.frombuffer(meta, "<i4").reshape(n_cells, 2)[:, 0].astype(np.int32)
