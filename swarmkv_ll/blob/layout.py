"""What a state blob is, byte by byte, and where everything in one stands.

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

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import SnapshotCorruptError

MAGIC = 0xAF143CD8
"""First field of a sequence's blob (`io_magic` in `src/llama-context.cpp`)."""

MAX_SEQ = 256
"""Sequences a context can have (`LLAMA_MAX_SEQ`)."""

CELL_EXTENSION_BYTES = 12
"""Size of `llama_kv_cell_ext`: x, y, token."""

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
    def ends(self) -> list[dict[int, int]]:
        """Of each memory, the attention caches and then the recurrent one: its sequences, and their next positions."""
        memories = [[stream.cells for stream in cache if stream] for cache in self.caches]
        memories += [[self.recurrent.cells]] if self.recurrent else []
        return [self._ends_of([cells for cells in memory if len(cells)]) for memory in memories]

    def _ends_of(self, memory: list[Cells]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for cells in memory:
            if self.seq_id is not None:
                ends[self.seq_id] = max(ends.get(self.seq_id, 0), int(cells.pos.max()) + 1)
                continue
            pos = cells.pos[cells.owner_cells]
            for seq_id in np.unique(cells.owners).tolist():
                ends[seq_id] = max(ends.get(seq_id, 0), int(pos[cells.owners == seq_id].max()) + 1)
        return dict(sorted(ends.items()))

    @cached_property
    def sequences(self) -> dict[int, int]:
        """Each sequence inside, and its next position."""
        seq_ids = sorted({seq_id for ends in self.ends for seq_id in ends})
        return {seq_id: max(ends.get(seq_id, 0) for ends in self.ends) for seq_id in seq_ids}

    @property
    def n_tokens(self) -> int:
        """Next position; of a whole context's the sum over its sequences."""
        return sum(self.sequences.values())

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
