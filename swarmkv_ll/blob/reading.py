"""Reading a blob: every length and count is checked against the buffer before it is used."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..errors import BlobError, InvalidArgumentError
from .layout import (
    CELL_EXTENSION_BYTES,
    GGML_TYPES,
    MAGIC,
    MAX_SEQ,
    Bytes,
    Cells,
    Int32,
    Layout,
    Parts,
    RecurrentLayout,
    StreamLayout,
    Tensor,
)
from .views import StateBlob

_MAX_POS = 2**31 - 2
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS

_LIKELY = [
    Parts(n_attention, recurrent, extension, has_v)
    for has_v in (True, False)
    for extension in (False, True)
    for n_attention, recurrent in ((1, False), (2, False), (1, True), (2, True))
] + [Parts(0, True, False)]
"""What `parse` tries where it is not told, in order."""


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
