"""What goes into an engine batch and what comes out: batches filled by numpy, logits rows left where they are."""

from __future__ import annotations

import weakref
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .errors import LiveViewsError, NoLogitsError
from .ffi import C, ffi
from .model import ModelHandle, Tokens

Logits = npt.NDArray[np.float32]


class ContextHandle:
    """Owns a `llama_context *`, or borrows one, and keeps its model's weights alive."""

    def __init__(self, parent: ModelHandle, borrowed: Any = None) -> None:
        # Freed by cffi, not by a Python finalizer, which would swallow a Ctrl-C. Before the weights: it stands first.
        slot = ffi.new("struct llama_context *[1]", [borrowed or ffi.NULL])
        self.slot = slot if borrowed else ffi.gc(slot, C.skv_context_free)
        self.parent, self.borrowed = parent, borrowed is not None

    def free(self) -> None:
        """Free an own context; a borrowed one is its owner's."""
        if not self.borrowed:
            C.skv_context_free(self.slot)

    @property
    def pointer(self) -> Any:
        return self.slot[0]


class Batch:
    """A `llama_batch` over numpy arrays, filled by slices."""

    def __init__(self, n_batch: int) -> None:
        self.token = np.zeros(n_batch, np.int32)
        self.position = np.zeros(n_batch, np.int32)
        self.seq = np.zeros(n_batch, np.int32)
        self.output = np.zeros(n_batch, np.int8)
        self.n_seq = np.ones(n_batch, np.int32)
        self.seq_pointer = self.seq.ctypes.data + 4 * np.arange(n_batch, dtype=np.uintp)
        self.struct = ffi.new("llama_batch *")
        self.struct.token = ffi.from_buffer("llama_token[]", self.token)
        self.struct.pos = ffi.from_buffer("llama_pos[]", self.position)
        self.struct.n_seq_id = ffi.from_buffer("int32_t[]", self.n_seq)
        self.struct.seq_id = ffi.cast("llama_seq_id **", self.seq_pointer.ctypes.data)
        self.struct.logits = ffi.from_buffer("int8_t[]", self.output)

    def fill(self, token: Tokens, position: Tokens, seq: Tokens, output: npt.NDArray[np.int8]) -> Any:
        n = len(token)
        self.token[:n], self.position[:n], self.seq[:n], self.output[:n] = token, position, seq, output
        self.struct.n_tokens = n
        return self.struct[0]


class Outputs:
    """The logits rows of the last decode, most often in the engine's memory, and rows that came with a restore."""

    def __init__(self, handle: ContextHandle, n_vocab: int, capacity: int) -> None:
        self._handle, self._n_vocab = handle, n_vocab
        self._capacity = capacity  # rows the engine's buffer holds; it only grows, and moves when it does
        self._view: weakref.ref[Logits] | None = None  # the array all views of the engine's buffer derive from
        self._copied: list[Logits] = []  # rows of all engine batches of the last decode but its last one
        self._in_engine = 0  # rows of that last one
        self._row_of: dict[int, int] = {}  # sequence: row after its last token, counted over both
        self._restored: dict[int, Logits] = {}  # sequence: row that came with its snapshot

    @property
    def viewed(self) -> bool:
        """Whether a view of the engine's buffer is alive."""
        return self._view is not None and self._view() is not None

    def begin(self, output: npt.NDArray[np.int8], n_batch: int) -> None:
        """Before a decode. Refuses one that would make the engine move its buffer away under a live view."""
        most = max(int(output[i : i + n_batch].sum()) for i in range(0, len(output), n_batch))
        if most > self._capacity and self.viewed:
            raise LiveViewsError(f"logits buffer of {self._capacity} rows, too small for {most},", 1)
        self.forget_decode()

    def collect(self, n_rows: int, *, last: bool) -> None:
        """After an engine batch: keep its rows, unless they stay in the engine's memory as the last ones."""
        self._capacity = max(self._capacity, n_rows)
        if last:
            self._in_engine = n_rows
        elif n_rows:
            rows = self._engine_rows(n_rows).copy()
            rows.flags.writeable = False
            self._copied.append(rows)

    def advance(self, seq: int, row: int | None) -> None:
        """`seq` has been decoded; `row` is the one after its last token, if that was asked for."""
        self.drop(seq)
        if row is not None:
            self._row_of[seq] = row

    def restore(self, seq: int, row: Logits | None) -> None:
        """`seq` now stands where a snapshot was taken; `row` came with it."""
        self.drop(seq)
        if row is not None:
            self._restored[seq] = row

    def copy(self, source: int, target: int) -> None:
        """`target` now stands where `source` does."""
        self.drop(target)
        if source in self._row_of:
            self._row_of[target] = self._row_of[source]
        elif source in self._restored:
            self._restored[target] = self._restored[source]

    def drop(self, seq: int) -> None:
        """`seq` no longer stands where its row says."""
        self._row_of.pop(seq, None)
        self._restored.pop(seq, None)

    def clear(self) -> None:
        """No sequence stands anywhere."""
        self.forget_decode()
        self._restored.clear()

    def everything(self) -> Logits:
        rows = [*self._copied, *([self._engine_rows(self._in_engine)] if self._in_engine else [])]
        if not rows:
            raise NoLogitsError("the last decode gave no logits")
        found = rows[0] if len(rows) == 1 else np.concatenate(rows)
        found.flags.writeable = False
        return cast("Logits", found[0] if len(found) == 1 else found)

    def row(self, seq: int) -> Logits:
        at = self._row_of.get(seq)
        if at is None:
            if seq not in self._restored:
                raise NoLogitsError(
                    f"no logits for sequence {seq}: decode a token of it first (a restored state has them only if it was "
                    "taken with them, and not cut to n_tokens)"
                )
            return self._restored[seq]
        for rows in self._copied:
            if at < len(rows):
                return cast("Logits", rows[at])
            at -= len(rows)
        return cast("Logits", self._engine_rows(self._in_engine)[at])

    def forget_decode(self) -> None:
        """The last decode has left no rows; those that came with a restore stay."""
        self._row_of.clear()
        self._copied.clear()
        self._in_engine = 0

    def _engine_rows(self, n_rows: int) -> Logits:
        # Asking for the address also makes the engine wait for its results and put them in batch order.
        address = int(ffi.cast("uintptr_t", C.llama_get_logits(self._handle.pointer)))
        root = self._view() if self._view else None
        if root is None:
            root = np.asarray(_ArrayInterface(self._handle, address, (self._capacity, self._n_vocab)))
            self._view = weakref.ref(root)
        return root[:n_rows]


class _ArrayInterface:
    """Base object of the logits views: what numpy keeps alive, and with it the engine's context."""

    def __init__(self, handle: ContextHandle, address: int, shape: tuple[int, int]) -> None:
        self.handle = handle
        self.__array_interface__ = {"shape": shape, "typestr": "<f4", "data": (address, True), "version": 3}
