"""Other blobs made of one: a prefix, a delta and its base, other streams, V the other way round, one sequence of many.

Each function plans an :class:`Edit`, which knows its size and copies nothing. `Edit.write` puts it into memory of the
caller's in one pass: runs of cells by memcpy, the bookkeeping in between made anew.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError, PartialRemovalError
from .layout import GGML_TYPES, MAGIC, MAX_SEQ, Bytes, Cells, Layout, Parts, StreamLayout, Tensor
from .reading import parse
from .views import StateBlob

_Index = npt.NDArray[np.intp]
_Step = Callable[[Bytes, int, "_Scratch"], int]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some cells of a stream of a blob, on their way into another."""

    data: Bytes
    stream: StreamLayout
    index: _Index

    @property
    def cells(self) -> Cells:
        return _take(self.stream.cells, self.index)


@dataclass(frozen=True, eq=False)
class Edit:
    """A blob that is yet to be written.

    Attributes
    ----------
    n_bytes : int
        Its size.
    """

    n_bytes: int
    _parts: Parts
    _sources: tuple[Bytes, ...]
    _steps: tuple[_Step, ...]

    def __repr__(self) -> str:
        return f"<Edit to {self.n_bytes:,} bytes>"

    def write(self, out: npt.NDArray[np.uint8] | None = None) -> StateBlob:
        """Write it.

        Parameters
        ----------
        out : ndarray of uint8, shape (at least n_bytes,), optional
            Where to, a lease's `array` for example; new memory by default. The blob's first byte is its first.

        Returns
        -------
        StateBlob
            A view of the first `n_bytes` of `out`.

        Raises
        ------
        InvalidArgumentError
            `out` is too small, read-only, not plain bytes, or overlaps what is read from; nothing was written.
        """
        if out is None:
            out = np.empty(self.n_bytes, np.uint8)
        if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
            raise InvalidArgumentError("out should be a contiguous array of uint8 with one dimension")
        if not out.flags.writeable or len(out) < self.n_bytes:
            raise InvalidArgumentError(f"out should be {self.n_bytes:,} bytes to write into, is {len(out):,}")
        target = out[: self.n_bytes]
        if any(np.may_share_memory(target, source) for source in self._sources):
            raise InvalidArgumentError("out overlaps the blob that is read from")
        at, scratch = 0, _Scratch()
        for step in self._steps:
            at = step(target, at, scratch)
        return parse(target, self._parts)


# ── the edits ────────────────────────────────────────────────────────────────────────────────────────


def slice(blob: StateBlob, n_tokens: int, *, window: int = 0) -> Edit:
    """The prefix of a sequence: its cells at positions below `n_tokens`, as they are.

    Exact: bit for bit what the prefill had computed when it had come to that token. (A prefill of the prefix alone gives
    the same bits if its batches end where those did; else it can round differently.)

    Parameters
    ----------
    n_tokens : int
        At least 1, at most what the sequence holds.
    window : int
        Tokens that the windowed layers look back (`Capabilities.sliding_window`). Cells that have left the window at
        `n_tokens` are dropped. 0: not known, so that every cell of the prefix has to be there.

    Raises
    ------
    PartialRemovalError
        A recurrent state is one for the whole sequence; or the window has moved on and no longer holds what the
        prefix's end looks back to.
    InvalidArgumentError
        A whole context's blob (`extract` a sequence first), or `n_tokens` out of range, or no cell below it.
    """
    end = _one_sequence(blob.layout, "slice")
    n_tokens, window = operator.index(n_tokens), _checked_window(window)
    if not 1 <= n_tokens <= end:
        raise InvalidArgumentError(f"n_tokens should be 1 to {end}, is {n_tokens}")
    if blob.layout.recurrent and n_tokens != end:
        raise PartialRemovalError(f"a recurrent state of {end} tokens cannot be cut to {n_tokens}")
    begin = int(blob.layout.positions.min())
    if n_tokens <= begin:
        raise InvalidArgumentError(f"n_tokens should be above {begin}, the sequence's first position, is {n_tokens}")
    _check_window(blob.layout, n_tokens, window)
    return _edit(blob.layout, _selected(blob, lambda pos: pos < n_tokens, n_tokens, window), blob)


def delta(blob: StateBlob, begin: int) -> Edit:
    """The cells of a sequence at positions from `begin` on, which `append` puts behind a state of `begin` tokens.

    Raises
    ------
    PartialRemovalError
        A recurrent state has no such cells.
    InvalidArgumentError
        A whole context's blob, `begin` out of range, or no cell at that position.
    """
    end, begin = _one_sequence(blob.layout, "delta"), operator.index(begin)
    if not 1 <= begin < end:
        raise InvalidArgumentError(f"begin should be 1 to {end - 1}, is {begin}")
    if blob.layout.recurrent:
        raise PartialRemovalError(f"a recurrent state of {end} tokens has no cells of its own from {begin} on")
    if begin not in blob.layout.positions:  # nothing that ends there could be its base
        raise InvalidArgumentError(f"begin should be a position of the sequence, it has none at {begin}")
    return _edit(blob.layout, _selected(blob, lambda pos: pos >= begin, end, 0), blob)


def append(blob: StateBlob, tail: StateBlob, *, window: int = 0) -> Edit:
    """A state and the `delta` that goes on where it ends, as one. Whether they belong together is the caller's to know.

    Raises
    ------
    InvalidArgumentError
        The delta does not begin where the state ends, or its layers, types or V layout are others.
    PartialRemovalError
        Recurrent states cannot be appended.
    """
    base, other = blob.layout, tail.layout
    end, last = _one_sequence(base, "append to"), _one_sequence(other, "append")
    if base.recurrent or other.recurrent:
        raise PartialRemovalError("a recurrent state is one for the whole sequence: nothing can be appended to it")
    shapes = [pair for pair in zip(base.shape, other.shape, strict=False) if None not in pair]
    if base.parts != other.parts or any(a != b for a, b in shapes) or base.v_transposed != other.v_transposed:
        raise InvalidArgumentError("layers, types or V layout of the delta are not those of the state")
    begin, window = int(other.positions.min()), _checked_window(window)
    if begin != end:
        raise InvalidArgumentError(f"the delta should begin at position {end}, begins at {begin}")
    caches = _selected(blob, lambda pos: pos < end, last, window)
    tails = _selected(tail, lambda pos: pos >= end, last, window)
    home = next(i for i, pieces in enumerate(caches[0]) if pieces)
    for streams, more in zip(caches, tails, strict=True):
        at = next((i for i, pieces in enumerate(streams) if pieces), home)
        streams[at] += [piece for pieces in more for piece in pieces]
    return _edit(base, caches, blob, tail)


def convert(blob: StateBlob, *, n_stream: int | None = None, v_transposed: bool | None = None) -> Edit:
    """The same state for a context of another shape.

    Parameters
    ----------
    n_stream : int, optional
        1 for a unified cache, else as many as the context has sequences. Exact. Of a whole context, cells that several
        sequences share are copied to each of them, and back they stay apart.
    v_transposed : bool, optional
        V as contexts without flash attention keep it (transposed), or with. The bytes are the same values, but such
        contexts compute a little differently, so that a state goes on as if it had been computed there only up to
        rounding.

    Raises
    ------
    InvalidArgumentError
        Quantized V cannot be transposed; sequence ids do not fit into `n_stream`.
    """
    layout = blob.layout
    n_stream = layout.n_stream if n_stream is None or not layout.caches else operator.index(n_stream)
    if layout.caches and not 1 <= n_stream <= MAX_SEQ:
        raise InvalidArgumentError(f"n_stream should be 1 to {MAX_SEQ}, is {n_stream}")
    if v_transposed:
        types = {
            GGML_TYPES[tensor.type] for cache in layout.caches for stream in cache if stream for tensor in stream.v
        }
        if quantized := sorted(kind.name for kind in types if kind.block > 1):
            raise InvalidArgumentError(f"V of type {', '.join(quantized)} cannot be transposed")
    outside = [seq_id for seq_id in layout.sequences if layout.whole and 1 < n_stream <= seq_id]
    if outside:
        raise InvalidArgumentError(f"sequence {outside[0]} has no stream among {n_stream}")
    streams = [_restreamed(blob.data, cache, n_stream, layout.seq_id) for cache in layout.caches]
    return _edit(layout, streams, blob, v_transposed=v_transposed)


def extract(blob: StateBlob, seq_id: int, *, window: int = 0) -> Edit:
    """One sequence of a whole context's blob, as a sequence's blob. `window` as in `slice`.

    Raises
    ------
    InvalidArgumentError
        It is a sequence's blob already, or there is no such sequence.
    """
    layout, seq_id = blob.layout, operator.index(seq_id)
    if not layout.whole:
        raise InvalidArgumentError(f"this is sequence {layout.seq_id} alone")
    if seq_id not in layout.sequences:
        raise InvalidArgumentError(f"sequence should be one of {list(layout.sequences)}, is {seq_id}")
    first = layout.sequences[seq_id] - window if _checked_window(window) else 0
    caches = []
    for i, cache in enumerate(layout.caches):
        streams: list[list[_Piece]] = []
        for stream in cache:
            index = stream.cells.held_by(seq_id) if stream else np.empty(0, np.intp)
            if stream and i:
                index = index[stream.cells.pos[index] >= first]
            streams.append([_Piece(blob.data, stream, index)] if stream and len(index) else [])
        caches.append(streams)
    return _edit(layout, caches, blob, seq_id=seq_id)


# ── what they share ──────────────────────────────────────────────────────────────────────────────────


def _one_sequence(layout: Layout, what: str) -> int:
    """End of a sequence's blob."""
    if layout.whole:
        raise InvalidArgumentError(f"cannot {what} a whole context: extract a sequence first")
    if not len(layout.positions):
        raise InvalidArgumentError(f"cannot {what} an empty sequence")
    return layout.n_tokens


def _checked_window(window: int) -> int:
    if operator.index(window) < 0:
        raise InvalidArgumentError(f"window should be 0 or more, is {window}")
    return operator.index(window)


def _check_window(layout: Layout, n_tokens: int, window: int) -> None:
    """That windowed caches still hold what the token at `n_tokens` looks back to."""
    if not layout.caches:
        return
    needed = layout.positions[layout.positions < n_tokens]
    if window:
        needed = needed[needed > n_tokens - window]
    for cache in layout.caches[1:]:
        held = [stream.cells.pos for stream in cache if stream]
        missing = np.setdiff1d(needed, np.concatenate(held) if held else [])
        if len(missing):
            raise PartialRemovalError(
                f"the sliding window{f' of {window} tokens' if window else ''} no longer holds {len(missing)} positions "
                f"({int(missing.min())} to {int(missing.max())}) that a prefix of {n_tokens} tokens looks back to"
            )


def _selected(
    blob: StateBlob, wanted: Callable[[Any], Any], end: int, window: int
) -> list[list[list[_Piece]]]:  # fmt: skip
    """Of each cache the cells whose position is wanted, of windowed ones those the window still holds at `end`."""
    caches = []
    for i, cache in enumerate(blob.layout.caches):
        streams: list[list[_Piece]] = []
        for stream in cache:
            pos = stream.cells.pos if stream else np.empty(0, np.int32)
            keep = wanted(pos)
            if i and window:
                keep &= pos >= end - window
            streams.append([_Piece(blob.data, stream, np.flatnonzero(keep))] if stream and keep.any() else [])
        caches.append(streams)
    return caches


def _restreamed(
    data: Bytes, cache: Sequence[StreamLayout | None], n_stream: int, seq_id: int | None
) -> list[list[_Piece]]:
    """Pieces of each stream to be. A sequence's cells go to its own stream, as the engine writes them."""
    everything = [[_Piece(data, stream, np.arange(len(stream.cells)))] if stream else [] for stream in cache]
    if len(cache) == n_stream:
        return everything
    if n_stream == 1 or seq_id is not None:
        streams: list[list[_Piece]] = [[] for _ in range(n_stream)]
        streams[seq_id if seq_id is not None and seq_id < n_stream else 0] = [
            p for pieces in everything for p in pieces
        ]
        return streams
    if len(cache) > 1:
        return [*everything, *([] for _ in range(n_stream))][:n_stream]
    split: list[list[_Piece]] = []
    for owner in range(n_stream):
        held_by = [(stream, stream.cells.held_by(owner)) for stream in cache if stream]
        split.append([_Piece(data, _owned_by(stream, owner), index) for stream, index in held_by if len(index)])
    return split


def _owned_by(stream: StreamLayout, seq_id: int) -> StreamLayout:
    """The stream as if each cell belonged to one sequence."""
    cells = stream.cells
    n = len(cells)
    mine = Cells(cells.pos, cells.extension, np.ones(n, np.int32), np.full(n, seq_id, np.int32))
    return StreamLayout(mine, stream.v_transposed, stream.k, stream.v)


def _take(cells: Cells, index: _Index) -> Cells:
    if len(index) == len(cells):
        return cells
    n_owners = cells.n_owners[index]
    firsts = (np.cumsum(cells.n_owners) - cells.n_owners)[index]
    places = np.arange(int(n_owners.sum())) - np.repeat(np.cumsum(n_owners) - n_owners - firsts, n_owners)
    extension = None if cells.extension is None else cells.extension[index]
    return Cells(cells.pos[index], extension, n_owners, cells.owners[places])


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────


def _edit(
    layout: Layout,
    caches: list[list[list[_Piece]]],
    *blobs: StateBlob,
    v_transposed: bool | None = None,
    seq_id: int | None = None,
) -> Edit:
    """Plan a blob of the given pieces, for each cache and stream; of the sequence `seq_id`, or what `layout` is of."""
    out = _Plan()
    seq = layout.seq_id if seq_id is None else seq_id
    if seq is None:
        assert layout.arch is not None
        out.fields(struct.pack("<I", len(layout.arch)) + layout.arch.encode("ascii"))
    else:
        out.fields(struct.pack("<Ii", MAGIC, seq))
    for streams in caches:
        out.fields(struct.pack("<I", len(streams)))
        for pieces in streams:
            cells = [piece.cells for piece in pieces]
            n_cells = sum(map(len, cells))
            out.fields(struct.pack("<I", n_cells))
            if not n_cells:
                continue
            for some in cells:
                out.fields(_cell_bytes(some, seq))
            first = pieces[0].stream
            transposed = first.v_transposed if v_transposed is None else bool(v_transposed)
            out.fields(struct.pack("<II", transposed, len(first.k)))
            for layer in range(len(first.k)):
                out.tensor([(piece, piece.stream.k[layer]) for piece in pieces], n_cells, transposed=False)
            for layer in range(len(first.v)):
                out.tensor([(piece, piece.stream.v[layer]) for piece in pieces], n_cells, transposed=transposed)
    if layout.recurrent:
        _recurrent(out, layout, blobs[0].data, seq_id)
    return Edit(out.n_bytes, layout.parts, tuple(blob.data for blob in blobs), tuple(out.steps))


def _recurrent(out: _Plan, layout: Layout, data: Bytes, seq_id: int | None) -> None:
    part = layout.recurrent
    assert part is not None
    if seq_id is None:
        out.copy(data[part.offset : layout.n_bytes])
        return
    index = part.cells.held_by(seq_id)
    out.fields(struct.pack("<I", len(index)) + b"".join(struct.pack("<iI", pos, 0) for pos in part.cells.pos[index]))
    head = next(offset for offset, _, name in layout.bookkeeping if name == "recurrent s_trans")
    out.copy(data[head : head + 8])
    for tensor in (*part.r, *part.s):
        out.copy(data[tensor.offset - 12 : tensor.offset])
        for i in index:
            out.copy(data[tensor.offset + i * tensor.row_bytes :][: tensor.row_bytes])


def _cell_bytes(cells: Cells, seq_id: int | None) -> bytes:
    """The bookkeeping of cells; of a sequence's blob, if one is given, each with that one owner."""
    n = len(cells)
    n_owners = np.ones(n, np.int32) if seq_id is not None else cells.n_owners
    owners = np.full(n, seq_id, np.int32) if seq_id is not None else cells.owners
    extension = np.empty((n, 0), np.int32) if cells.extension is None else cells.extension
    head = np.concatenate([cells.pos[:, None], n_owners[:, None], extension], axis=1).astype("<i4")
    if (n_owners == 1).all():
        return np.concatenate([head, owners[:, None].astype("<i4")], axis=1).tobytes()
    fixed = head.shape[1]
    begins = np.cumsum(n_owners) - n_owners + fixed * np.arange(n)
    words = np.empty(fixed * n + len(owners), "<i4")
    words[begins[:, None] + np.arange(fixed)] = head
    words[np.arange(len(owners)) + fixed * (np.repeat(np.arange(n), n_owners) + 1)] = owners
    return words.tobytes()


class _Plan:
    """Steps that write a blob, one after the other, and how many bytes they will have written."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.steps: list[_Step] = []

    def fields(self, data: bytes) -> None:
        self.copy(np.frombuffer(data, np.uint8))

    def copy(self, data: Bytes) -> None:
        def step(out: Bytes, at: int, scratch: _Scratch) -> int:
            out[at : at + len(data)] = data
            return at + len(data)

        self._add(step, len(data))

    def tensor(self, sources: list[tuple[_Piece, Tensor]], n_cells: int, *, transposed: bool) -> None:
        """One layer's K or V: its head, and the pieces' cells in a row."""
        first = sources[0][1]
        el_size = GGML_TYPES[first.type].n_bytes
        if transposed:
            self.fields(struct.pack("<iII", first.type, el_size, first.row_bytes // el_size))
        else:
            self.fields(struct.pack("<iQ", first.type, first.row_bytes))
        n_bytes = first.row_bytes * n_cells

        def step(out: Bytes, at: int, scratch: _Scratch) -> int:
            flat, begin = out[at : at + n_bytes], 0
            for piece, tensor in sources:
                _copy_cells(flat, begin, n_cells, piece, tensor, el_size, transposed, scratch)
                begin += len(piece.index)
            return at + n_bytes

        self._add(step, n_bytes)

    def _add(self, step: _Step, n_bytes: int) -> None:
        self.steps.append(step)
        self.n_bytes += n_bytes


def _copy_cells(
    flat: Bytes,
    begin: int,
    n_cells: int,
    piece: _Piece,
    tensor: Tensor,
    el_size: int,
    transposed: bool,
    scratch: _Scratch,
) -> None:
    """Copy a piece's cells of one tensor to cells begin … of `flat`, a tensor of n_cells cells."""
    n_source, n, n_embd = len(piece.stream.cells), len(piece.index), tensor.row_bytes // el_size
    source = piece.data[tensor.offset : tensor.offset + n_source * tensor.row_bytes]
    if transposed:
        out = flat.reshape(n_embd, -1)[:, begin * el_size : (begin + n) * el_size]
    else:
        out = flat.reshape(n_cells, -1)[begin : begin + n]
    if tensor.n_embd:
        columns = source.reshape(n_embd, -1)
        if transposed:
            _gather_columns(out, columns, piece.index, el_size)
            return
        aligned = scratch(0, (n_embd, n * el_size))
        _gather_columns(aligned, columns, piece.index, el_size)
    else:
        rows = source.reshape(n_source, -1)
        if not transposed:
            _gather_rows(out, rows, piece.index)
            return
        aligned = scratch(0, (n, n_embd * el_size))
        _gather_rows(aligned, rows, piece.index)
    values = aligned.view(f"u{el_size}")
    turned = scratch(1, (values.shape[1], len(values) * el_size))
    _transpose(values, turned.view(values.dtype))
    out[...] = turned


_TILE = 128
_MANY_RUNS = 64


def _transpose(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy, transposed, tile by tile, so that what is read and written stays in the processor's caches.

    Both in aligned memory: numpy moves elements at odd addresses byte by byte.
    """
    for a in range(0, len(values), _TILE):
        for b in range(0, values.shape[1], 4 * _TILE):
            out[b : b + 4 * _TILE, a : a + _TILE] = values[a : a + _TILE, b : b + 4 * _TILE].T


class _Scratch:
    """Two pieces of memory that are used again for each layer: new ones would be faulted in page by page."""

    def __init__(self) -> None:
        self.kept: dict[int, Bytes] = {}

    def __call__(self, which: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
        n_bytes = shape[0] * shape[1]
        if which not in self.kept or len(self.kept[which]) < n_bytes:
            self.kept[which] = np.empty(n_bytes, np.uint8)
        return self.kept[which][:n_bytes].reshape(shape)


def _gather_rows(out: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8], index: _Index) -> None:
    runs = _runs(index)
    if len(runs) > _MANY_RUNS:
        np.take(rows, index, axis=0, out=out, mode="clip")  # "raise" would gather into a buffer first
        return
    at = 0
    for a, b in runs:
        out[at : at + b - a] = rows[a:b]
        at += b - a


def _gather_columns(
    out: npt.NDArray[np.uint8], columns: npt.NDArray[np.uint8], index: _Index, el_size: int
) -> None:  # fmt: skip
    runs = _runs(index)
    if len(runs) > _MANY_RUNS:
        # np.take: an index in brackets can give memory in another order, which has no view as bytes.
        out[...] = np.take(columns.view(f"u{el_size}"), index, axis=1).view(np.uint8)
        return
    at = 0
    for a, b in runs:
        out[:, at : at + (b - a) * el_size] = columns[:, a * el_size : b * el_size]
        at += (b - a) * el_size


def _runs(index: _Index) -> list[tuple[int, int]]:
    """(begin, end) of each run of consecutive indices."""
    ends = np.flatnonzero(np.diff(index) != 1)
    begins = [0, *(ends + 1).tolist()]
    stops = [*(ends + 1).tolist(), len(index)]
    return [(int(index[a]), int(index[b - 1]) + 1) for a, b in zip(begins, stops, strict=True)]
