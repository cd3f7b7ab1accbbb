"""A context's state on its way out of the engine and into it, and what it has to be like."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np

from . import runtime
from .arena import available_memory
from .blob import MAGIC, Layout, Parts, read_layout
from .context import Context
from .errors import BlobError, SnapshotError
from .ffi import C, ffi
from .identity import Identity
from .outputs import Logits
from .record import Bytes


def identity(ctx: Context) -> Identity:
    """What states of this context depend on."""
    return Identity(
        ctx.model.file,
        runtime.STAMP,
        ctx.type_k,
        ctx.type_v,
        ctx.flash_attn,
        ctx._rotation,
        ctx.rope.beyond(ctx.model.rope),
        ctx.adapters,
    )


def write(ctx: Context, pointer: Any, seq: int | None, data: Any, n_bytes: int) -> Layout:
    """Have the engine write a sequence's state, or with None every sequence's, to `data`, and look at what it wrote.

    Raises
    ------
    SnapshotError
        It wrote another number of bytes, or in a layout that is not known.
    """
    with runtime.engine_log() as log:
        if seq is None:
            written = C.llama_state_get_data(pointer, data, n_bytes)
        else:
            written = C.llama_state_seq_get_data(pointer, data, n_bytes, seq)
    C.llama_synchronize(pointer)  # before anybody sees the bytes, or gives them back
    if written != n_bytes:
        reason = runtime.last_reason(log, "no reason given")
        raise SnapshotError(f"the engine wrote {written:,} of {n_bytes:,} bytes: {reason}")
    layout = _looked_at(ctx, np.frombuffer(ffi.buffer(data, n_bytes), np.uint8))
    if layout.sequences:
        ctx.model._shapes.setdefault(_kind(ctx), layout.shape)
    return layout


def _looked_at(ctx: Context, data: Bytes) -> Layout:
    """The layout of what the engine wrote, and with it what this model's states are made of."""
    expected = parts(ctx)
    try:
        return read_layout(data, expected)
    except BlobError as error:
        if expected.n_attention == 2:
            # A model can have a window by its metadata and no windowed layers, hence one cache: exaone4 of few layers.
            with suppress(BlobError):
                layout = read_layout(data, replace(expected, n_attention=1))
                ctx.model._parts = layout.parts
                return layout
        raise SnapshotError(f"the state of this architecture has an unknown layout: {error}") from error


def parts(ctx: Context) -> Parts:
    """What this context's states are made of; certain once a state was written, or `shape` asked for."""
    return ctx.model._parts or ctx.model.capabilities.blob_parts


def read(ctx: Context, pointer: Any, seq: int | None, data: Any, layout: Layout, rows: Mapping[int, Logits]) -> None:
    """Have the engine read a state that was found to fit: into `seq`, or, with None, in place of everything.

    Raises
    ------
    SnapshotError
        It refused all the same: what was to be replaced is empty.
    """
    try:
        put(pointer, seq, data, layout.n_bytes)
        if seq is None:
            ctx._replaced_all(layout, rows)
        else:
            ctx._replaced(seq, layout.positions, rows.get(seq))
    except BaseException:
        if seq is None:
            ctx._clear_now()
        else:
            ctx._replaced(seq, None, None)
        raise


def put(pointer: Any, seq: int | None, data: Any, n_bytes: int, flags: int = 0) -> None:
    """Have the engine read a state, and wait until it needs the bytes no more.

    Raises
    ------
    SnapshotError
        It refused.
    """
    with runtime.engine_log() as log:
        if seq is None:
            n_read = C.llama_state_set_data(pointer, data, n_bytes)
        else:
            n_read = C.llama_state_seq_set_data_ext(pointer, data, n_bytes, seq, flags)
    C.llama_synchronize(pointer)
    if n_read != n_bytes:
        reason = runtime.last_reason(log, "no reason given")
        raise SnapshotError(f"the engine read {n_read:,} of {n_bytes:,} bytes: {reason}")


_PIECE_BYTES = 1200
"""What starting a copy costs, in bytes that could have been copied meanwhile (measured: 100 ns and more)."""

_WORTH = 8
"""Restores within which moving the other sequences' cells has to pay."""


def make_room(ctx: Context, pointer: Any, seq: int, layout: Layout) -> tuple[int | None, bool]:
    """Before a restore into `seq`: see to it that it will not lie in more pieces than need be.

    The engine copies each run of neighbouring cells by itself, and of a transposed V each run of each row. Between
    other sequences' cells that can take many times as long. Then all cells are moved together, by writing the whole
    context out and reading it back, if that pays within a few restores. `seq` is empty afterwards.

    Returns
    -------
    runs : int or None
        Into how many runs of cells the state will go, where that is known.
    moved : bool
        Whether cells were moved.
    """
    cells = ctx._cells
    stream = next((stream for stream in layout.caches[0] if stream), None) if layout.caches else None
    if cells is None or stream is None or not cells.exact:
        return None, False
    n, runs = len(stream.cells), cells.runs_of(len(stream.cells), seq)
    rows = len(stream.k) + sum(t.n_embd or 1 for t in stream.v)  # pieces that each run is copied in
    row_bytes = sum(t.row_bytes for t in (*stream.k, *stream.v))
    saved = _PIECE_BYTES * rows * (runs - 1)
    n_others, runs_of_others = cells.others(seq)
    cost = 2 * n_others * row_bytes + _PIECE_BYTES * rows * (runs_of_others + 1)
    if saved <= (n * row_bytes + _PIECE_BYTES * rows) / 3 or cost > _WORTH * saved:
        return runs, False
    if not ctx.model.capabilities.attention_only or n_others * row_bytes > available_memory() // 2:
        return runs, False
    ctx._remove(seq, 0, 2**31 - 1)
    data = np.empty(ctx.state_size(None), np.uint8)
    whole = write(ctx, pointer, None, ffi.from_buffer("uint8_t[]", data), len(data))

    def put_back() -> None:
        put(pointer, None, ffi.from_buffer("uint8_t[]", data), len(data))
        cells.load(whole.caches[0])

    try:
        ctx._twice_if_interrupted(put_back)
    except SnapshotError:  # of what it had written itself
        ctx._clear_now()
        raise
    return cells.runs_of(n, seq), True


def shape(ctx: Context) -> tuple[Any, ...]:
    """Layers, types and row sizes of this context's states: what the engine demands of one that it is to read.

    The engine tells only by writing a state. So if none of this model, with these types, was written yet, a small
    context of that kind decodes one token.
    """
    known = ctx.model._shapes.get(_kind(ctx))
    if known is None:
        with ctx.model.context(
            256,
            flash_attn=False if ctx.v_transposed else "auto",
            type_k=ctx.type_k,
            type_v=ctx.type_v,
            n_batch=1,
            n_ubatch=1,
        ) as probe:
            probe.decode([0])
            known = look(probe, 0).shape
    return cast("tuple[Any, ...]", known)


def _kind(ctx: Context) -> tuple[str, str]:
    return ctx.type_k, ctx.type_v


def look(ctx: Context, seq: int) -> Layout:
    """The layout of a sequence's state, through memory that is let go again."""
    with ctx._lock:
        data = np.empty(ctx.state_size(seq), np.uint8)
        return write(ctx, ctx._ptr, seq, ffi.from_buffer("uint8_t[]", data), len(data))


def occupy(ctx: Context, seq: int, n_cells: int) -> None:
    """Have an empty sequence hold `n_cells` cells of zeros, at positions from 0 on, so that no other takes them.

    For one attention cache without transposed V: see `batching`.
    """
    (k, v), _ = shape(ctx)
    head = struct.pack("<IiII", MAGIC, seq, 1, n_cells)
    cells = np.zeros((n_cells, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n_cells), 1
    pieces = [head, cells.tobytes(), struct.pack("<II", 0, len(k))]
    n_bytes = sum(map(len, pieces)) + sum(12 + row_bytes * n_cells for _, row_bytes in (*k, *v))
    data, at = np.zeros(n_bytes, np.uint8), 0  # pages of zeros that are never written take no memory
    for piece in pieces:
        data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    for kind, row_bytes in (*k, *v):
        data[at : at + 12] = np.frombuffer(struct.pack("<iQ", kind, row_bytes), np.uint8)
        at += 12 + row_bytes * n_cells
    with ctx._changing() as pointer:
        layout = read_layout(data, parts(ctx))
        read(ctx, pointer, seq, ffi.from_buffer("uint8_t[]", data), layout, {})
