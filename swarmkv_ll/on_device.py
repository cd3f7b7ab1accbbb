"""Snapshots that stay where the KV cache lies: on the GPU, if there is one.

The engine keeps one a sequence, inside its context (`LLAMA_STATE_SEQ_FLAGS_ON_DEVICE`; `llama_io_write_device` and
`llama_io_read_device` in `llama-context.cpp` of the pinned source). Its copies there have no way to fail: what they
cannot do aborts the process, or gives other values, silently. So all of it is refused before:

- reading back a state that a later one of the same sequence has overwritten: another size aborts, the same size is taken;
- K or V of a quantized type: blocks are counted as if they were values, so that only a part is copied;
- as many bytes as the last time in other runs of cells: they go into the memory of the last time, and abort if they need
  more padding than those did. This is decided for each device by itself: one that holds windowed layers only holds as
  many bytes each time;
- memory that is not there: the allocation is not looked at.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from . import runtime, state
from .arena import available_memory
from .blob import GGML_TYPES
from .blob.layout import CELL_EXTENSION_BYTES
from .context import Context
from .errors import (
    ClosedError,
    DeviceMemoryError,
    HostMemoryError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    NoLogitsError,
    NotOnDeviceError,
    SnapshotError,
)
from .ffi import C, ffi
from .identity import Compatibility, Identity, Reason
from .limits import KV_TYPES
from .model import Tokens
from .outputs import Logits
from .snapshot import Restored, Snapshot, checked_tokens

_BESIDE = 4 << 20
"""Bytes of host memory that the engine and Python may take between our looking and the engine's allocation."""

_HELD_ERROR = 16_000
"""Bytes that `Context.kv_memory` may be off by for a device: three caches, each told to a hundredth of a MiB."""

_FLAGS = C.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE


@dataclass(frozen=True)
class _Kept:
    """What the engine keeps of a sequence: how many were taken, and of what the last one is made."""

    number: int
    n_bytes: int | None  # None: not known, since a Ctrl-C
    cells: tuple[int, int] | None  # of the first cache, and what grows with those of the others; None: not known
    runs: tuple[int, ...] | None  # lengths of the runs of cells; None: not known


class DeviceSnapshot:
    """One sequence's state, copied by the engine to where the KV cache lies. Made by `Context.snapshot(where="device")`.

    It can go back into the context it was taken of, into any sequence, as often as wanted, until the next one of the same
    sequence is taken, which overwrites it, or the context is closed. What the context does meanwhile leaves it alone.
    Everything else that a `Snapshot` does needs the bytes in host memory, and is refused (`NotOnDeviceError`).

    Attributes
    ----------
    ctx : Context
    seq : int
        The sequence it was taken of.
    n_tokens : int
        Position at which a branch goes on.
    n_bytes : int
        Bytes kept on the device. The memory is the context's: the next snapshot of this sequence uses it again, and
        `Context.close` frees it (the engine has no way to free it earlier; `release` does not).
    identity : Identity
    tokens : ndarray of int32, shape (n_tokens,), or None
        What it was computed from, if that was given.
    last_logits : ndarray of float32, shape (n_vocab,), or None
        The row after the last token, if the context still had it; in host memory.
    """

    def __init__(
        self,
        ctx: Context,
        seq: int,
        number: int,
        meta: npt.NDArray[np.uint8],
        n_tokens: int,
        n_bytes: int,
        tokens: Tokens | None,
        last_logits: Logits | None,
    ) -> None:
        self.ctx, self.seq, self.n_tokens, self.n_bytes = ctx, seq, n_tokens, n_bytes
        self.tokens, self.last_logits = tokens, last_logits
        self.identity: Identity = state.identity(ctx)
        self._number = number
        self._meta: npt.NDArray[np.uint8] | None = meta  # all but the values of K and V
        self._positions = ctx._cells.positions(seq) if ctx._cells else np.empty(0, np.int32)

    @classmethod
    def take(cls, ctx: Context, seq: int | None = 0, *, tokens: npt.ArrayLike | None = None) -> DeviceSnapshot:
        """Copy a sequence of `ctx` on its device. What was taken of the same sequence before is overwritten.

        Parameters
        ----------
        seq : int
        tokens : array of integers, shape (n_tokens,), optional
            What the state was computed from, kept beside it in host memory.

        Raises
        ------
        SnapshotError
            The sequence is empty, or the engine could not: earlier ones are still valid if it was not asked.
        DeviceMemoryError, HostMemoryError
            No room for it where the KV cache lies. Nothing was changed.
        InvalidArgumentError
            A whole context, a borrowed one, quantized K or V, or `tokens` that are not as many as the sequence holds.
        """
        if seq is None:
            raise InvalidArgumentError("a whole context cannot be kept on the device: take one of each sequence")
        with ctx._changing() as pointer:
            seq = ctx._check_seq(seq)
            _check_kind(ctx)
            end = ctx.position(seq)
            if not end:
                raise SnapshotError(f"sequence {seq} is empty")
            known = None if tokens is None else checked_tokens(ctx, {seq: end}, seq, tokens)
            logits = None
            with suppress(NoLogitsError):
                logits = ctx.logits(seq).copy()
                logits.flags.writeable = False
            meta = np.empty(int(C.llama_state_seq_get_size_ext(pointer, seq, _FLAGS)), np.uint8)
            n_bytes = ctx.state_size(seq) - len(meta)
            kept = _prepared(ctx, seq, n_bytes, len(meta))
            # What was there before is gone from here on, whatever happens.
            ctx._on_device[seq] = replace(kept, n_bytes=None, cells=None, runs=None)
            with runtime.engine_log() as log:
                data = ffi.from_buffer("uint8_t[]", meta)
                written = C.llama_state_seq_get_data_ext(pointer, data, len(meta), seq, _FLAGS)
            C.llama_synchronize(pointer)
            if written != len(meta):
                reason = runtime.last_reason(log, "no reason given")
                raise SnapshotError(
                    f"the engine wrote {written:,} of {len(meta):,} bytes beside the device's: {reason}"
                )
            ctx._on_device[seq] = kept
            return cls(ctx, seq, kept.number, meta, end, n_bytes, known, logits)

    @property
    def valid(self) -> bool:
        """Whether it can still be restored: not released, not overwritten, its context open."""
        return self._meta is not None and not self.ctx.closed and self._is_last()

    def _is_last(self) -> bool:
        return bool(self.ctx._on_device[self.seq].number == self._number)

    def can_restore(self, ctx: Context, seq: int | None = None) -> Compatibility:
        """What is against a `restore` with the same arguments. Changes nothing.

        Not seen is whether the smaller cache of a sliding window (without `swa_full`) has room: see `restore`.
        """
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"expected Context, got {type(ctx).__name__}")
        with ctx._looking():
            self._check_held()
            if ctx is not self.ctx:
                hint = "ctx.snapshot(arena) takes one that goes elsewhere"
                return Compatibility((Reason("context", "the one it was taken of", "another", hint),))
            if not self._is_last():
                last = ctx._on_device[self.seq].number
                name = f"device snapshot of sequence {self.seq}"
                return Compatibility((Reason(name, f"the last, number {last}", f"number {self._number}, overwritten"),))
            reasons, _ = self.identity.compare(state.identity(ctx))
            target = self.seq if seq is None else operator.index(seq)
            if not 0 <= target < ctx.n_seq_max:
                reasons.append(Reason("seq", f"0 to {ctx.n_seq_max - 1}", target))
            elif ctx._cells and (free := ctx._cells.free_without(target)) < len(self._positions):
                reasons.append(Reason("free KV cells", f"at least {len(self._positions)}", free))
            return Compatibility(tuple(reasons))

    def restore(self, ctx: Context, seq: int | None = None) -> Restored:
        """Put the state, all of it, into sequence `seq` of the context it was taken of, in place of what that held.

        Parameters
        ----------
        seq : int, optional
            By default the sequence that it was taken of.

        Returns
        -------
        Restored
            The next position, an int: a branch goes on there. Logits that follow are as after `Snapshot.restore`.

        Raises
        ------
        IncompatibleSnapshotError
            Another context, or overwritten, or no room; `can_restore` has all reasons. The context is as it was.
        ClosedError
            Released, or the context is closed.
        SnapshotError
            The engine refused it all the same: the sequence is empty, others are as they were. It does where the cache
            of a sliding window is full of cells that sequences share: which of them it still has, it does not tell.
        """
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"expected Context, got {type(ctx).__name__}")
        with ctx._changing() as pointer:
            found = self.can_restore(ctx, seq)
            if not found:
                raise IncompatibleSnapshotError(found.reasons)
            target = self.seq if seq is None else operator.index(seq)
            exact = ctx._cells is not None and ctx._cells.exact
            runs = ctx._cells.runs_of(len(self._positions), target) if ctx._cells and exact else None
            try:
                meta = self._check_held()
                state.put(pointer, target, ffi.from_buffer("uint8_t[]", meta), len(meta), _FLAGS)
                ctx._replaced(target, self._positions, self.last_logits)
            except BaseException:
                ctx._replaced(target, None, None)
                raise
            return Restored.at(self.n_tokens, (), runs, False)

    def release(self) -> None:
        """Let go of it: it can be restored no more. The memory stays the context's (see `n_bytes`).

        Raises
        ------
        ClosedError
            Released before.
        """
        self._check_held()
        self._meta = None

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._meta is None

    def _check_held(self) -> npt.NDArray[np.uint8]:
        if self._meta is None:
            raise ClosedError("snapshot")
        return self._meta

    def __getattr__(self, name: str) -> NoReturn:
        """What only a `Snapshot` has is refused by name."""
        if name == "lease" or (not name.startswith("_") and hasattr(Snapshot, name)):
            raise NotOnDeviceError(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> DeviceSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.released:
            self.release()

    def __repr__(self) -> str:
        end = ", released" if self.released else "" if self.valid else ", overwritten or its context closed"
        return f"<DeviceSnapshot of sequence {self.seq}, {self.n_tokens:,} tokens, {self.n_bytes:,} bytes{end}>"


def _check_kind(ctx: Context) -> None:
    if ctx._watch:
        raise InvalidArgumentError(
            "a borrowed context's states are not kept on the device: the other binding may overwrite them unseen"
        )
    types = (ctx.type_k, ctx.type_v) if ctx._cells else ()
    quantized = [kind for kind in types if C.ggml_is_quantized(KV_TYPES[kind])]
    if quantized:
        raise InvalidArgumentError(
            f"the engine cannot keep K or V of type {quantized[0]} on the device: use f16, bf16 or f32, or an arena"
        )


def _prepared(ctx: Context, seq: int, n_bytes: int, n_meta: int) -> _Kept:
    """What the engine will keep of a sequence once it has copied `n_bytes` of it, for which there is room.

    `n_meta` are the bytes beside them: so many for each cell of any cache, and others that are always as many.
    """
    before = ctx._on_device.get(seq, _Kept(0, 0, (0, 0), ()))
    kinds, n_cells = ctx.model.capabilities, 0
    runs: tuple[int, ...] | None = ()  # a recurrent state is always in one piece
    if ctx._cells:
        known = ctx._cells.exact and not kinds.sliding_window  # whose second cache is not counted
        runs, n_cells = ctx._cells.runs(seq) if known else None, len(ctx._cells.positions(seq))
    cell_bytes = 12 + CELL_EXTENSION_BYTES * kinds.cell_extensions
    now = _Kept(before.number + 1, n_bytes, (n_cells, n_meta - cell_bytes * n_cells), runs)
    if before.cells != now.cells:
        _check_memory(ctx, n_bytes, n_cells, len(runs) if runs is not None else n_cells)
    if (runs is None or runs != before.runs) and (reason := _uses_again(ctx, before, now)) and not _unpadded(ctx):
        hint = "decode a token more or less, or " * (before.n_bytes == n_bytes)
        raise SnapshotError(
            f"sequence {seq} {reason}, in other pieces, and may need more padding than there is room for: {hint}use an arena"
        )
    return now


def _uses_again(ctx: Context, before: _Kept, now: _Kept) -> str:
    """Why the engine may use its memory of the last time: it does where a device then held as many bytes. Or nothing."""
    if before.n_bytes is None or before.cells is None or now.cells is None:
        return "may hold as many bytes as when it was last kept on the device"
    if before.n_bytes == now.n_bytes:
        return f"holds as many bytes as when it was last kept on the device, {now.n_bytes:,}"
    # More cells in both caches are more bytes wherever a part of either lies, and fewer are fewer.
    change = {int(np.sign(b - a)) for a, b in zip(before.cells, now.cells, strict=True)}
    if len(ctx.kv_memory) > 1 and ctx.model.capabilities.sliding_window and change not in ({1}, {-1}):
        return f"may hold as many bytes as when it was last kept on one of {', '.join(ctx.kv_memory)}"
    return ""


def _unpadded(ctx: Context) -> bool:
    """Whether each run of cells fills its memory to the end, however the cells are cut into runs."""
    rows = [row for kinds in state.shape(ctx)[:-1] if kinds for kind in kinds for _, row in kind]
    return not ctx.v_transposed and not any(row % _alignment() for row in rows)


def _alignment() -> int:
    """The largest of any device's memory, in bytes; all are powers of two."""
    devices = [C.ggml_backend_dev_get(i) for i in range(C.ggml_backend_dev_count())]
    return max(int(C.ggml_backend_buft_get_alignment(C.ggml_backend_dev_buffer_type(device))) for device in devices)


def _most_on(ctx: Context, held: int, n_bytes: int, n_cells: int) -> int:
    """The most bytes that a state of `n_bytes` has on a device which holds `held` bytes of the caches."""
    if len(ctx.kv_memory) == 1:
        return n_bytes
    whole = held + _HELD_ERROR
    if ctx.model.capabilities.attention_only:  # else a small part of one cache and all of another can be here
        whole = -(-whole * n_cells // ctx.n_ctx)
    return min(n_bytes, whole)


def _check_memory(ctx: Context, n_bytes: int, n_cells: int, n_runs: int) -> None:
    """See to it that the engine's allocation will succeed, by making one like it on each device that holds KV."""
    n_pieces = ctx.model.n_layer * (2 * n_runs + 3)  # runs of K and V; R, S and the like of a recurrent layer
    if ctx.v_transposed and n_cells:
        # A run of V is a piece for each value of a row, and layers differ in those: no more than all bytes are V's.
        value_bytes = GGML_TYPES[KV_TYPES[ctx.type_v]].n_bytes
        n_pieces += -(-n_bytes * n_runs // (value_bytes * n_cells))
    padding = _alignment() * n_pieces
    for name, held in ctx.kv_memory.items():
        required = _most_on(ctx, held, n_bytes, n_cells) + padding
        device = C.ggml_backend_dev_by_name(name.encode())
        on_host = C.ggml_backend_dev_type(device) == C.GGML_BACKEND_DEVICE_TYPE_CPU
        if on_host:
            required += _BESIDE
            if required > (available := available_memory()):
                raise HostMemoryError(required, available)
        with runtime.engine_log():
            buffer = C.ggml_backend_buft_alloc_buffer(C.ggml_backend_dev_buffer_type(device), required)
        if buffer == ffi.NULL and on_host:
            raise HostMemoryError(required, available_memory())
        if buffer == ffi.NULL:
            free, total = ffi.new("size_t *"), ffi.new("size_t *")
            C.ggml_backend_dev_memory(device, free, total)
            raise DeviceMemoryError(name, required, free[0])
        C.ggml_backend_buffer_free(buffer)
