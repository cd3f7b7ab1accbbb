"""A blob seen as numpy arrays: streams, layers, recurrent tensors. Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from .layout import GGML_TYPES, Bytes, Cells, Int32, Layout, StreamLayout, Tensor


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
