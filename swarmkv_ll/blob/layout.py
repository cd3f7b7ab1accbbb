"""What a state blob is, byte by byte: every field checked, tensors as views.

The engine writes little-endian fields without padding (read in `src/llama-context.cpp`, `src/llama-kv-cache.cpp` and
`src/llama-memory-recurrent.cpp` of the pinned source):

======================  ==========================================================================================
head of a sequence      magic u32, seq_id i32 (`llama_state_seq_get_data`)
head of a context       length u32, the architecture's name (`llama_state_get_data`)
an attention cache      n_stream u32, then for each stream: cell_count u32, and if it is not 0:
                        for each cell pos i32, n_seq_id u32, [extension, 12 bytes], seq_id i32 × n_seq_id;
                        v_trans u32, n_layer u32;
                        for each layer K: type i32, row_size u64, row_size × cell_count bytes;
                        for each layer V: the same, or, if v_trans, type i32, el_size u32, n_embd u32,
                        el_size × n_embd × cell_count bytes; no V at all with MLA
a recurrent memory      cell_count u32; for each cell pos i32, n_seq_id u32, seq_id i32 × n_seq_id;
                        s_trans u32 (0), n_layer u32; for each layer that has one R: type i32, row_size u64,
                        row_size × cell_count bytes; then S in the same way
======================  ==========================================================================================

A model with one attention cache has one such part; with a sliding window two (the full layers', then the windowed
layers'); a recurrent model has the recurrent part only; a hybrid one the attention part, then the recurrent one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BlobError, InvalidArgumentError, SnapshotCorruptError

MAGIC = 0xAF143CD8
"""First field of a sequence's blob (`io_magic` in `src/llama-context.cpp`)."""

MAX_SEQ = 256
"""Sequences a context can have (`LLAMA_MAX_SEQ`)."""

CELL_EXTENSION_BYTES = 12
"""Size of `llama_kv_cell_ext`: x, y, token."""

_MAX_POS = 2**31 - 2
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class GgmlType(NamedTuple):
    """A type of the engine's: its name, values a block, bytes a block, and numpy's type where it has one.

    bf16 is given as uint16, its bits.
    """

    name: str
    block: int
    n_bytes: int
    dtype: str | None


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("f32", 1, 4, "<f4"),
    1: GgmlType("f16", 1, 2, "<f2"),
    2: GgmlType("q4_0", 32, 18, None),
    3: GgmlType("q4_1", 32, 20, None),
    6: GgmlType("q5_0", 32, 22, None),
    7: GgmlType("q5_1", 32, 24, None),
    8: GgmlType("q8_0", 32, 34, None),
    20: GgmlType("iq4_nl", 32, 18, None),
    30: GgmlType("bf16", 1, 2, "<u2"),
}
"""Types a KV cache can be kept in, by the number a blob carries."""


@dataclass(frozen=True)
class Parts:
    """Which memories a model's blob is made of.

    Attributes
    ----------
    n_attention : int
        Attention caches: 0, 1, or 2 with a sliding window.
    recurrent : bool
        Whether a recurrent memory follows.
    cell_extension : bool
        Whether cells carry x, y and token (M-RoPE).
    has_v : bool
        Whether the attention caches keep V (MLA does not).
    """

    n_attention: int
    recurrent: bool
    cell_extension: bool
    has_v: bool = True


_LIKELY = [
    Parts(n_attention, recurrent, extension, has_v)
    for has_v in (True, False)
    for extension in (False, True)
    for n_attention, recurrent in ((1, False), (2, False), (1, True), (2, True))
] + [Parts(0, True, False)]


class Tensor(NamedTuple):
    """Where one layer's K, V, R or S stands in a blob. `n_embd` is 0 unless it is transposed."""

    type: int
    offset: int
    row_bytes: int
    n_embd: int


@dataclass(frozen=True, eq=False)
class Cells:
    """Who stands in a stream's cells. Copies of the bookkeeping, not views.

    Attributes
    ----------
    pos : ndarray of int32, shape (n_cells,)
    extension : ndarray of int32, shape (n_cells, 3), or None
        x, y and token of each cell.
    n_owners : ndarray of int32, shape (n_cells,)
        Sequences each cell belongs to.
    owners : ndarray of int32, shape (n_owners.sum(),)
        Those sequences, cell after cell.
    """

    pos: Int32
    extension: Int32 | None
    n_owners: Int32
    owners: Int32

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def owner_cells(self) -> npt.NDArray[np.intp]:
        """The cell that each entry of `owners` is about."""
        return np.repeat(np.arange(len(self.pos)), self.n_owners)

    def held_by(self, seq_id: int) -> npt.NDArray[np.intp]:
        """Indices of the cells that belong to a sequence, in order."""
        found: npt.NDArray[np.intp] = self.owner_cells[self.owners == seq_id]
        return found


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """One stream's cells and tensors."""

    cells: Cells
    v_transposed: bool
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class RecurrentLayout:
    """The recurrent memory's cells and tensors."""

    offset: int
    cells: Cells
    r: tuple[Tensor, ...]
    s: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything in a blob stands; holds no view of it.

    Attributes
    ----------
    n_bytes : int
    parts : Parts
    seq_id : int or None
        The sequence it was exported from; None for a whole context's.
    arch : str or None
        A whole context's architecture.
    caches : tuple of tuple of StreamLayout or None
        For each attention cache its streams, None for an empty one.
    recurrent : RecurrentLayout or None
    bookkeeping : tuple of (offset, bytes, field)
        Every byte that is not tensor data, as it was found.
    """

    n_bytes: int
    parts: Parts
    seq_id: int | None
    arch: str | None
    caches: tuple[tuple[StreamLayout | None, ...], ...]
    recurrent: RecurrentLayout | None
    bookkeeping: tuple[tuple[int, bytes, str], ...] = field(repr=False)

    @property
    def whole(self) -> bool:
        """Whether it is a whole context's."""
        return self.seq_id is None

    @property
    def n_stream(self) -> int:
        """Streams of the attention caches, 0 without one."""
        return len(self.caches[0]) if self.caches else 0

    @property
    def v_transposed(self) -> bool | None:
        """Whether V is stored transposed (said without V too); None if no cells tell."""
        return next((stream.v_transposed for cache in self.caches for stream in cache if stream), None)

    @cached_property
    def positions(self) -> Int32:
        """Position of each cell of the first attention cache, or of the recurrent memory without one."""
        if self.caches:
            found = [stream.cells.pos for stream in self.caches[0] if stream]
        else:
            found = [self.recurrent.cells.pos] if self.recurrent else []
        return np.concatenate(found) if found else np.empty(0, np.int32)

    @cached_property
    def sequences(self) -> dict[int, int]:
        """Each sequence inside, and its next position."""
        ends: dict[int, int] = {}
        for cells in self._all_cells():
            if self.seq_id is not None:
                ends[self.seq_id] = max(ends.get(self.seq_id, 0), int(cells.pos.max()) + 1)
                continue
            pos = cells.pos[cells.owner_cells]
            for seq_id in np.unique(cells.owners).tolist():
                ends[seq_id] = max(ends.get(seq_id, 0), int(pos[cells.owners == seq_id].max()) + 1)
        return dict(sorted(ends.items()))

    def _all_cells(self) -> list[Cells]:
        found = [stream.cells for cache in self.caches for stream in cache if stream]
        return found + ([self.recurrent.cells] if self.recurrent and len(self.recurrent.cells) else [])

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Types and row sizes of every layer: what has to be equal for the engine to take it. None where it is empty."""
        caches = []
        for cache in self.caches:
            shapes = {
                tuple(tuple((t.type, t.row_bytes) for t in tensors) for tensors in (stream.k, stream.v))
                for stream in cache
                if stream
            }
            caches.append(shapes.pop() if shapes else None)
        if not self.recurrent:
            return (*caches, None)
        tensors = (self.recurrent.r, self.recurrent.s)
        return (*caches, tuple(tuple((t.type, t.row_bytes) for t in kind) for kind in tensors))

    def check(self, data: memoryview) -> None:
        """Check that the bookkeeping in `data` is byte for byte what it was.

        The engine's own checks let damage through that spoils a context for good (a negative position, a count
        too large), so a blob is handed back to it only if they could not have anything to find.

        Raises
        ------
        SnapshotCorruptError
            The first byte that differs, and the field it belongs to.
        """
        for offset, wanted, name in self.bookkeeping:
            found = bytes(data[offset : offset + len(wanted)])
            if found != wanted:
                at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
                raise SnapshotCorruptError(offset + at, name)


# ── views ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's keys and values in one stream.

    Attributes
    ----------
    k_type, v_type : str
        As in `GGML_TYPES`; `v_type` is "" where the cache keeps no V.
    """

    _data: Bytes
    _n_cells: int
    _k: Tensor
    _v: Tensor | None

    @property
    def k_type(self) -> str:
        return GGML_TYPES[self._k.type].name

    @property
    def v_type(self) -> str:
        return GGML_TYPES[self._v.type].name if self._v else ""

    @property
    def k(self) -> npt.NDArray[Any]:
        """Keys, shape (n_cells, n_embd_k): a view.

        float32 and float16 as they are, bf16 as uint16 (its bits); of quantized types the rows' bytes, uint8 of shape
        (n_cells, row_bytes).
        """
        return rows(self._data, self._k, self._n_cells)

    @property
    def v(self) -> npt.NDArray[Any] | None:
        """Values in the same way, (n_cells, n_embd_v); of a transposed V a transposed view; None without V."""
        return rows(self._data, self._v, self._n_cells) if self._v else None

    def __repr__(self) -> str:
        v = f", V {self.v_type} {self.v.shape}" if self.v is not None else ""
        return f"<Layer K {self.k_type} {self.k.shape}{v}>"

    def dequantize(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """Keys and values as float32, shapes (n_cells, n_embd): copies.

        Raises
        ------
        ImportError
            A quantized type, and the package `gguf` is not installed (extra ``swarmkv-ll[inspect]``).
        """
        v = None if self._v is None or self.v is None else float32(self.v, self._v.type)
        return float32(self.k, self._k.type), v


def rows(data: Bytes, tensor: Tensor, n_cells: int) -> npt.NDArray[Any]:
    """A tensor's values as a view of shape (n_cells, n_embd), or its rows' bytes."""
    flat = data[tensor.offset : tensor.offset + n_cells * tensor.row_bytes]
    values: npt.NDArray[Any] = flat.view(GGML_TYPES[tensor.type].dtype or np.uint8)
    n_embd = tensor.row_bytes // values.itemsize
    return values.reshape(n_embd, n_cells).T if tensor.n_embd else values.reshape(n_cells, n_embd)


def float32(values: npt.NDArray[Any], kind: int) -> npt.NDArray[np.float32]:
    name, _, _, dtype = GGML_TYPES[kind]
    if name == "bf16":
        return (np.ascontiguousarray(values).astype(np.uint32) << 16).view(np.float32)
    if dtype:
        return values.astype(np.float32)
    import gguf.quants

    found: npt.NDArray[np.float32] = gguf.quants.dequantize(
        np.ascontiguousarray(values), gguf.GGMLQuantizationType(kind)
    )
    return found


@dataclass(frozen=True, eq=False)
class Stream:
    """One stream of an attention cache.

    Attributes
    ----------
    pos : ndarray of int32, shape (n_cells,)
    seq_id : ndarray of int32, shape (n_cells,)
        Sequence of each cell; of a cell that several share, the first. `cells` tells all.
    cells : Cells
    layers : list of Layer
        Empty where the stream is.
    """

    pos: Int32
    seq_id: Int32
    cells: Cells
    layers: list[Layer]

    def __repr__(self) -> str:
        return f"<Stream {len(self.pos):,} cells, {len(self.layers)} layers>"


@dataclass(frozen=True, eq=False)
class Recurrent:
    """The recurrent memory of a blob.

    Attributes
    ----------
    pos : ndarray of int32, shape (n_cells,)
        Last position that went into each cell's state.
    r, s : list of ndarray of float32, shape (n_cells, n)
        Each recurrent layer's convolution and state rows; views.
    """

    pos: Int32
    r: list[npt.NDArray[Any]]
    s: list[npt.NDArray[Any]]


_NO_CELLS = Cells(np.empty(0, np.int32), None, np.empty(0, np.int32), np.empty(0, np.int32))


class StateBlob:
    """A blob seen as arrays. Nothing is copied; it is valid as long as the buffer is.

    Attributes
    ----------
    layout : Layout
    data : ndarray of uint8, shape (n_bytes,)
    """

    def __init__(self, layout: Layout, data: Bytes) -> None:
        self.layout, self.data = layout, data

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    @property
    def seq_id(self) -> int | None:
        """The sequence it was exported from; None for a whole context's."""
        return self.layout.seq_id

    @property
    def sequences(self) -> dict[int, int]:
        """Each sequence inside, and its next position."""
        return self.layout.sequences

    @property
    def n_stream(self) -> int:
        """Streams of the attention caches, 0 without one."""
        return self.layout.n_stream

    @property
    def v_transposed(self) -> bool | None:
        """Whether V is stored transposed (said without V too); None if no cells tell."""
        return self.layout.v_transposed

    @property
    def caches(self) -> list[list[Stream]]:
        """Streams of each attention cache; with a sliding window the full layers' cache, then the windowed layers'."""
        return [[self._stream(stream) for stream in cache] for cache in self.layout.caches]

    @property
    def pos(self) -> Int32:
        """Position of each cell of the first cache, shape (n_cells,): a copy."""
        return self.layout.positions

    @property
    def layers(self) -> list[Layer]:
        """Layers of the first cache's only stream with cells; empty without one.

        Raises
        ------
        InvalidArgumentError
            Several streams have cells: look into `caches`.
        """
        held = [stream for stream in self.layout.caches[0] if stream] if self.layout.caches else []
        if len(held) > 1:
            raise InvalidArgumentError(f"{len(held)} streams hold cells: look into caches")
        return self._stream(held[0]).layers if held else []

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent memory, or None."""
        found = self.layout.recurrent
        if found is None:
            return None
        n = len(found.cells)
        return Recurrent(
            found.cells.pos, [rows(self.data, t, n) for t in found.r], [rows(self.data, t, n) for t in found.s]
        )

    def _stream(self, stream: StreamLayout | None) -> Stream:
        if stream is None:
            return Stream(_NO_CELLS.pos, _NO_CELLS.owners, _NO_CELLS, [])
        cells = stream.cells
        first = np.cumsum(cells.n_owners) - cells.n_owners
        values = stream.v or (None,) * len(stream.k)
        layers = [Layer(self.data, len(cells), k, v) for k, v in zip(stream.k, values, strict=True)]
        return Stream(cells.pos, cells.owners[first], cells, layers)

    def __repr__(self) -> str:
        what = "context" if self.seq_id is None else "sequence"
        return f"<StateBlob of a {what}, {len(self.pos):,} cells, {self.n_bytes:,} bytes>"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def parse(buffer: Any, parts: Parts | None = None) -> StateBlob:
    """Look into a blob: `llama_state_seq_get_data`'s or `llama_state_get_data`'s.

    Every length and count is checked against the buffer before it is used; tensor data is passed over, not touched.

    Parameters
    ----------
    buffer : buffer of bytes
        A whole blob. Not copied: the result's arrays are views of it, read-only if it is.
    parts : Parts, optional
        What the blob's model is made of (`Model.capabilities.blob_parts`). Without it, the first kind of memory that
        explains every byte is taken.

    Raises
    ------
    BlobError
        A field does not hold what it should, or the blob is too short or too long.
    InvalidArgumentError
        Not a contiguous buffer of bytes.
    """
    if parts is not None and not isinstance(parts, Parts):
        raise InvalidArgumentError(f"expected Parts, got {type(parts).__name__}")
    try:
        data: Bytes = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgumentError(f"expected a contiguous buffer: {error}") from None
    try:
        return StateBlob(read_layout(data, parts), data)
    except BlobError:
        del buffer, data  # as in read_layout
        raise


def read_layout(data: Bytes, parts: Parts | None = None) -> Layout:
    """What `parse` finds, without views of the buffer."""
    # Of memoryviews slices are cheap. What is raised here keeps no view alive in its traceback: the buffer can be freed.
    with data.data as view:
        del data
        if parts is not None:
            return _layout(_Reader(view), parts)
        furthest: BlobError | None = None
        for candidate in _LIKELY:
            try:
                return _layout(_Reader(view), candidate)
            except BlobError as error:
                if furthest is None or error.offset > furthest.offset:
                    furthest = error.with_traceback(None)  # whose frames hold all that was read
        assert furthest is not None
        raise furthest


class _Reader:
    """Reads bookkeeping fields in order, remembers them, and skips tensor data; never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0
        self.seen: list[tuple[int, bytes, str]] = []

    @property
    def left(self) -> int:
        return len(self.data) - self.offset

    def take(self, n_bytes: int, name: str) -> bytes:
        if n_bytes > self.left:
            raise BlobError(self.offset, name, f"{n_bytes:,} bytes", f"{self.left:,} bytes to the end")
        return self.keep(bytes(self.data[self.offset : self.offset + n_bytes]), name)

    def keep(self, found: bytes, name: str) -> bytes:
        self.seen.append((self.offset, found, name))
        self.offset += len(found)
        return found

    def number(self, code: str, name: str) -> int:
        fmt = "<" + code
        return int(struct.unpack(fmt, self.take(struct.calcsize(fmt), name))[0])

    def within(self, code: str, name: str, low: int, high: int) -> int:
        found = self.number(code, name)
        self.expect(found, f"{low:,} to {high:,}", name, low <= found <= high)
        return found

    def expect(self, actual: object, expected: object, name: str, ok: bool) -> None:
        if not ok:
            raise BlobError(self.seen[-1][0], name, expected, actual)


def _layout(reader: _Reader, parts: Parts) -> Layout:
    seq_id = arch = None
    first = reader.number("I", "magic")
    if first == MAGIC:
        seq_id = reader.within("i", "seq_id", 0, MAX_SEQ - 1)
    else:
        reader.expect(hex(first), f"{MAGIC:#x}, or an architecture's length", "magic", 1 <= first <= 64)
        name = reader.take(first, "architecture")
        reader.expect(name, "a printable name", "architecture", name.isascii() and name.decode("latin-1").isprintable())
        arch = name.decode("ascii")
    whole = seq_id is None
    caches: list[tuple[StreamLayout | None, ...]] = []
    for _ in range(parts.n_attention):
        caches.append(_attention(reader, parts, whole, caches))
    recurrent = _recurrent(reader, whole) if parts.recurrent else None
    if reader.left:
        raise BlobError(reader.offset, "end of blob", "nothing more", f"{reader.left:,} bytes more")
    return Layout(len(reader.data), parts, seq_id, arch, tuple(caches), recurrent, tuple(reader.seen))


def _attention(
    reader: _Reader, parts: Parts, whole: bool, before: list[tuple[StreamLayout | None, ...]]
) -> tuple[StreamLayout | None, ...]:
    """The next cache; `before` are those that came first."""
    n_stream = reader.within("I", "n_stream", 1, MAX_SEQ)
    if before:
        wanted = len(before[0])
        reader.expect(n_stream, f"{wanted}, as in the first cache", "n_stream", n_stream == wanted)
    v_transposed = next((int(stream.v_transposed) for cache in before for stream in cache if stream), None)
    first: StreamLayout | None = None
    streams: list[StreamLayout | None] = []
    for s in range(n_stream):
        n_cells = reader.number("I", f"stream {s} cell_count")
        if n_cells == 0:
            streams.append(None)
            continue
        if not whole and first:  # the engine would put one after the other into the same sequence
            reader.expect(n_cells, "0, as another stream has the sequence", f"stream {s} cell_count", False)
        owner = s if whole and n_stream > 1 else None
        cells = _cells(reader, n_cells, parts.cell_extension, whole, owner, f"stream {s}")
        v_trans = reader.within("I", "v_trans", 0, 1)
        if v_transposed is not None:
            reader.expect(v_trans, f"{v_transposed}, as in the cells before", "v_trans", v_trans == v_transposed)
        v_transposed = v_trans
        # Of two caches one has no layers where the window is on all of them.
        n_layer = reader.within("I", "n_layer", int(parts.n_attention == 1), _MAX_LAYERS)
        if first:
            wanted = len(first.k)
            reader.expect(n_layer, f"{wanted}, as in the stream before", "n_layer", n_layer == wanted)
        name = f"cache {len(before)}"
        k = _tensors(reader, f"{name} K of layer", n_layer, n_cells, like=first.k if first else None)
        v: tuple[Tensor, ...] = ()
        if parts.has_v:
            v = _tensors(
                reader,
                f"{name} V of layer",
                n_layer,
                n_cells,
                like=first.v if first else None,
                transposed=bool(v_trans),
            )
        streams.append(StreamLayout(cells, bool(v_trans), k, v))
        first = streams[-1]
    return tuple(streams)


def _cells(reader: _Reader, n_cells: int, extension: bool, whole: bool, owner: int | None, name: str) -> Cells:
    """Cells of an attention cache: each position once a sequence, each sequence once a cell; all of `owner`, if given."""
    fixed = 2 + (CELL_EXTENSION_BYTES // 4 if extension else 0)
    begin = reader.offset
    wide = fixed + 1
    if 4 * wide * n_cells > reader.left:
        raise BlobError(
            begin, f"{name} cells", f"at least {4 * wide * n_cells:,} bytes", f"{reader.left:,} bytes to the end"
        )
    taken = bytes(reader.data[begin : begin + 4 * wide * n_cells])  # numpy would hold on to a view
    meta = np.frombuffer(taken, "<i4").reshape(n_cells, wide)
    if (meta[:, 1] == 1).all():
        n_owners, owners = np.ones(n_cells, np.int32), meta[:, -1].astype(np.int32)
        pos, ext = meta[:, 0].astype(np.int32), meta[:, 2:-1].astype(np.int32)
        reader.keep(taken, f"{name} cells")
    else:
        at = int(np.argmax(meta[:, 1] != 1))
        if not whole:
            raise BlobError(begin + 4 * wide * at + 4, f"{name} cell {at} n_seq_id", 1, int(meta[at, 1]) % 2**32)
        pos, ext, n_owners, owners = _shared_cells(reader, n_cells, fixed, name)

    def fail(at: int, word: int, what: str, expected: object, actual: object) -> None:
        offset = begin + 4 * (int(n_owners[:at].sum()) + fixed * at + word)
        raise BlobError(offset, f"{name} cell {at} {what}", expected, actual)

    wrong = (pos < 0) | (pos > _MAX_POS)
    if wrong.any():
        at = int(np.argmax(wrong))
        fail(at, 0, "pos", f"0 to {_MAX_POS:,}", int(pos[at]))
    owner_cells = np.repeat(np.arange(n_cells), n_owners)
    wrong = (owners < 0) | (owners >= MAX_SEQ) if owner is None else owners != owner
    if wrong.any():
        entry = int(np.argmax(wrong))
        at = int(owner_cells[entry])
        word = fixed + entry - int(n_owners[:at].sum())
        wanted = f"0 to {MAX_SEQ - 1}" if owner is None else f"{owner}, as of each cell of its stream"
        fail(at, word, "seq_id", wanted, int(owners[entry]))
    ordered = not whole and not extension and bool((pos[1:] > pos[:-1]).all())
    if not ordered:  # cells that were reused stand in another order
        keys = [pos[owner_cells], owners] if whole else [pos]
        keys += [ext[owner_cells if whole else slice(None), i] for i in range(2 if extension else 0)]
        table = np.stack(keys)
        order = np.lexsort(table)
        same = (table[:, order][:, 1:] == table[:, order][:, :-1]).all(axis=0)
        if same.any():
            twice = int(order[int(np.argmax(same)) + 1])
            at = int(owner_cells[twice])
            fail(at, 0, "pos", "each position once a sequence", f"{int(pos[at])} twice")
    return Cells(pos, ext if extension else None, n_owners, owners)


def _shared_cells(reader: _Reader, n_cells: int, fixed: int, name: str) -> tuple[Int32, Int32, Int32, Int32]:
    """Cells of which some belong to several sequences, so that each has a length of its own."""
    data, at, end = reader.data, reader.offset, len(reader.data)
    begins = np.empty(n_cells, np.int64)
    for i in range(n_cells):
        if at + 4 * fixed + 4 > end:
            wanted = f"at least {4 * fixed + 4} bytes"
            raise BlobError(at, f"{name} cell {i}", wanted, f"{end - at:,} bytes to the end")
        (n,) = _COUNT.unpack_from(data, at + 4)
        if not 1 <= n <= MAX_SEQ or at + 4 * (fixed + n) > end:
            raise BlobError(at + 4, f"{name} cell {i} n_seq_id", f"1 to {MAX_SEQ}, all there", n)
        begins[i] = at
        at += 4 * (fixed + n)
    begins = (begins - reader.offset) // 4
    words = np.frombuffer(reader.take(at - reader.offset, f"{name} cells"), "<i4")
    head = words[begins[:, None] + np.arange(fixed)].astype(np.int32)
    n_owners = head[:, 1].copy()
    firsts = np.cumsum(n_owners) - n_owners
    index = np.arange(int(n_owners.sum())) - np.repeat(firsts - begins - fixed, n_owners)
    return head[:, 0].copy(), head[:, 2:].copy(), n_owners, words[index].astype(np.int32)


_COUNT = struct.Struct("<I")
_TENSOR_HEAD = struct.Struct("<iII")


def _tensors(
    reader: _Reader,
    name: str,
    n_most: int,
    n_cells: int,
    *,
    like: tuple[Tensor, ...] | None = None,
    transposed: bool = False,
    recurrent: bool = False,
) -> tuple[Tensor, ...]:
    """Every layer's K, or V, each as in `like`; of a recurrent memory what there is to the end, at most `n_most`.

    In one loop over local names: this is most of what an export costs beside the copy.
    """
    data, at, end, seen = reader.data, reader.offset, len(reader.data), reader.seen
    found: list[Tensor] = []
    for i in range(n_most):
        if recurrent and at == end:
            break
        head = bytes(data[at : at + 12])
        if len(head) < 12:
            raise BlobError(at, f"{name} {i}: type and size", "12 bytes", f"{len(head)} bytes to the end")
        kind, size, n_embd = _TENSOR_HEAD.unpack(head)
        known = GGML_TYPES.get(kind)
        if known is None:
            raise BlobError(at, f"{name} {i}: type", f"one of {sorted(GGML_TYPES)}", kind)
        # Transposed: element size and row length; else one u64 row size.
        row_bytes = size * n_embd if transposed else size | n_embd << 32
        least = 0 if recurrent else 1  # a short convolution has no S
        if (
            row_bytes % known.n_bytes
            or not least <= row_bytes < 2**32
            or (transposed and (known.block > 1 or size != known.n_bytes))
        ):
            wanted = f"{least} to 4,294,967,295 and a multiple of {known.n_bytes} ({known.name})"
            if transposed:
                wanted = f"elements of {known.n_bytes} bytes ({known.name}), 1 or more"
            actual = f"{n_embd:,} of {size:,}" if transposed else f"{row_bytes:,}"
            raise BlobError(at + 4, f"{name} {i}: row size", wanted, actual)
        if like and (kind, row_bytes) != (like[i].type, like[i].row_bytes):
            wanted = f"type {like[i].type} and {like[i].row_bytes:,} bytes, as in the stream before"
            raise BlobError(at, f"{name} {i}: type and size", wanted, f"{kind} and {row_bytes:,}")
        seen.append((at, head, f"{name} {i}: type and size"))
        at += 12
        if row_bytes * n_cells > end - at:
            wanted = f"{row_bytes * n_cells:,} bytes"
            raise BlobError(at, f"{name} {i}: data", wanted, f"{end - at:,} bytes to the end")
        found.append(Tensor(kind, at, row_bytes, n_embd if transposed else 0))
        at += row_bytes * n_cells
    reader.offset = at
    return tuple(found)


def _recurrent(reader: _Reader, whole: bool) -> RecurrentLayout:
    offset = reader.offset
    most = MAX_SEQ if whole else 1
    n_cells = reader.within("I", "recurrent cell_count", 0, most)
    pos, n_owners, owners = [], [], []
    for i in range(n_cells):
        pos.append(reader.within("i", f"recurrent cell {i} pos", 0, _MAX_POS))
        n_owners.append(reader.within("I", f"recurrent cell {i} n_seq_id", int(whole), most if whole else 0))
        owners += [reader.within("i", f"recurrent cell {i} seq_id", 0, MAX_SEQ - 1) for _ in range(n_owners[-1])]
    if len(set(owners)) != len(owners):
        reader.expect(owners, "each sequence once", "recurrent cell seq_id", False)
    reader.within("I", "recurrent s_trans", 0, 0)
    n_layer = reader.within("I", "recurrent n_layer", 1, _MAX_LAYERS)
    # Layers without a recurrent state write nothing, and how many those are is not written either: what follows to the
    # end is as many R as S.
    tensors = _tensors(reader, "recurrent tensor", 2 * n_layer, n_cells, recurrent=True)
    half, odd = divmod(len(tensors), 2)
    reader.expect(len(tensors), "as many R as S, not none", "recurrent tensors", half > 0 and not odd)
    cells = Cells(np.array(pos, np.int32), None, np.array(n_owners, np.int32), np.array(owners, np.int32))
    return RecurrentLayout(offset, cells, tuple(tensors[:half]), tuple(tensors[half:]))
