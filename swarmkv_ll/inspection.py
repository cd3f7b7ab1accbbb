"""What is inside a snapshot file: read into memory, measured layer by layer, as plain data, as a picture. Needs no engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import skv
from .blob import GGML_TYPES, StateBlob
from .blob.layout import MAX_SEQ
from .blob.views import float32
from .cache import atomic_file, open_regular, write_all
from .errors import HostMemoryError, InvalidArgumentError, SnapshotFileError
from .record import SEQ_MAGIC, UNKNOWN, Bytes, Record, read_llama

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .blob import Cells, Layout
    from .blob.layout import Tensor

Format = Literal["skv", "llama"]
Norms = npt.NDArray[np.float64]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Opened:
    """A snapshot file that was read.

    Attributes
    ----------
    path : str
    format : {"skv", "llama"}
        Our own, or a sequence file of llama.cpp's. The latter does not tell what it was computed with, so that its
        record's identity is `UNKNOWN`, and its layout the first that explains every byte.
    n_bytes : int
        Size of the file.
    record : Record
    state : ndarray of uint8
        Memory, or (after `glance`) the file itself, mapped.
    tokens, logits : dict of int to int
        How many of them the file has, by sequence.
    """

    path: str
    format: Format
    n_bytes: int
    record: Record
    state: Bytes
    tokens: Mapping[int, int]
    logits: Mapping[int, int]

    @property
    def blob(self) -> StateBlob:
        return StateBlob(self.record.layout, self.state)


def read(path: str) -> Opened:
    """Read a file and check all of it. Its state is read into memory once; nothing else of that size is taken.

    Raises
    ------
    SnapshotFileError
        Neither a `.skv` file nor a sequence file of llama.cpp's, or a damaged one.
    HostMemoryError, OSError
    """
    if _format(path) == "llama":
        taken: list[Bytes] = []

        def allocate(n_bytes: int) -> Bytes:
            taken.append(_memory(n_bytes))
            return taken[0]

        ids = read_llama(path, allocate)
        record = Record.of_llama(path, ids, taken[0])
        return Opened(path, "llama", os.path.getsize(path), record, taken[0], _lengths(record.tokens), {})
    contents = skv.load(path, _memory)
    record = Record.of(contents, path)
    tokens, logits = _lengths(record.tokens), _lengths(record.logits)
    return Opened(path, "skv", os.path.getsize(path), record, contents.state, tokens, logits)


def glance(path: str) -> Opened:
    """Read of a `.skv` file what tells about it: header and bookkeeping, not the tensors between. Raises as `read`.

    Only the header's and meta's checksums are compared. The result is good for as long as nobody cuts the file short.
    llama.cpp's files are read as `read` does.
    """
    if _format(path) == "llama":
        return read(path)
    header = skv.peek(path)
    place = header.sections[-1]
    state: Bytes = np.empty(0, np.uint8)
    if place.length:
        state = np.asarray(np.memmap(path, np.uint8, "r", place.offset, (place.length,)))
    record = Record.of(skv.Contents(header.meta, {}, state), path)
    found: dict[str, dict[int, int]] = {"tokens": {}, "logits": {}}
    for section in header.sections[1:-1]:
        what, _, seq = section.name.partition(".")
        if what in found and seq.isdecimal():
            found[what][int(seq)] = section.shape[0]
    return Opened(path, "skv", header.n_bytes, record, state, found["tokens"], found["logits"])


def _format(path: str) -> Format:
    with open_regular(path) as file:
        head = file.read(4)
    if head == SEQ_MAGIC.to_bytes(4, "little"):
        return "llama"
    if head != skv.MAGIC[:4]:
        wanted = "that of a .skv file, or of a sequence file of llama.cpp's"
        raise SnapshotFileError(path, 0, "magic", wanted, head.hex(" ") or "nothing")
    return "skv"


def _memory(n_bytes: int) -> Bytes:
    try:
        return np.empty(n_bytes, np.uint8)
    except MemoryError:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        raise HostMemoryError(n_bytes, free) from None


def _lengths(arrays: Mapping[int, npt.NDArray[Any]]) -> dict[int, int]:
    return {seq: len(array) for seq, array in arrays.items()}


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Norm:
    """Lengths (L2 norms) of a tensor's rows: their mean, least and greatest, of those that are finite numbers."""

    n: int = 0
    total: float = 0.0
    least: float = np.inf
    greatest: float = -np.inf
    n_not_finite: int = 0

    def add(self, norms: Norms) -> None:
        finite = norms[np.isfinite(norms)]
        self.n_not_finite += len(norms) - len(finite)
        if len(finite):
            self.n += len(finite)
            self.total += float(finite.sum(dtype=np.float64))
            self.least = min(self.least, float(finite.min()))
            self.greatest = max(self.greatest, float(finite.max()))

    def to_dict(self) -> dict[str, Any]:
        known = self.n > 0
        return {
            "mean": self.total / self.n if known else None,
            "min": self.least if known else None,
            "max": self.greatest if known else None,
            "not_finite": self.n_not_finite,
        }


@dataclass
class Measured:
    """What one tensor of a layer is, and the norms of its rows."""

    type: str
    row_bytes: int
    norm: Norm = field(default_factory=Norm)

    @classmethod
    def of(cls, tensor: Tensor) -> Measured:
        return cls(GGML_TYPES[tensor.type].name, tensor.row_bytes)

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, "row_bytes": self.row_bytes, "norm": self.norm.to_dict()}


@dataclass
class LayerRow:
    """Keys and values of one layer of one cache; or, of a recurrent memory, a layer's R and S.

    Attributes
    ----------
    memory : {"attention", "full", "windowed", "recurrent"}
        "full" and "windowed" are the two caches of a model with a sliding window.
    layer : int
        Among those of its memory.
    first, second : Measured or None
        K and V (None without V), or R and S.
    """

    memory: str
    layer: int
    first: Measured
    second: Measured | None

    def to_dict(self) -> dict[str, Any]:
        names = ("r", "s") if self.memory == "recurrent" else ("k", "v")
        second = self.second.to_dict() if self.second else None
        return {"memory": self.memory, "layer": self.layer, names[0]: self.first.to_dict(), names[1]: second}


MAX_COLUMNS = 700
"""Columns of a map, not more than it has pixels: of a longer sequence each stands for several positions."""

MAX_MAPS = 4
"""Sequences that are drawn: the longest."""


class Grid:
    """Mean norms of a sequence's rows: by layer (down) and position (across), nan where nothing is held."""

    def __init__(self, seq: int, begin: int, end: int, n_rows: int) -> None:
        self.seq, self.begin, self.end = seq, begin, end
        self.width = -(-(end - begin) // MAX_COLUMNS)  # positions a column
        self.n_columns = -(-(end - begin) // self.width)
        self._sums = np.zeros((2, n_rows, self.n_columns))  # of keys, of values
        self._counts = np.zeros(self._sums.shape, np.int64)

    def add(self, which: int, row: int, pos: npt.NDArray[np.int32], norms: Norms) -> None:
        ok = np.isfinite(norms)
        column = (pos[ok] - self.begin) // self.width
        self._sums[which, row] += np.bincount(column, norms[ok], self.n_columns)
        self._counts[which, row] += np.bincount(column, minlength=self.n_columns)

    def map(self, which: int) -> npt.NDArray[np.float64]:
        """Of keys (0) or values (1), shape (layers, n_columns)."""
        with np.errstate(invalid="ignore"):
            found: npt.NDArray[np.float64] = self._sums[which] / self._counts[which]
        return found


def measure(
    opened: Opened, *, grids: bool = False, on_progress: Callable[[int, int], None] | None = None
) -> tuple[list[LayerRow], list[Grid]]:
    """Norms of every layer's rows, over all cells and streams; and, if wanted, grids of the longest sequences.

    Beside the state there are never more than a few MB in memory.

    Raises
    ------
    ImportError
        Quantized types, and `gguf` is not installed.
    """
    layout = opened.record.layout
    names = ["attention"] if len(layout.caches) == 1 else ["full", "windowed"]
    heights = [next((len(stream.k) for stream in cache if stream), 0) for cache in layout.caches]
    maps = _empty_grids(layout, sum(heights)) if grids else []
    rows: list[LayerRow] = []
    total, done = sum(n * sum(map(bool, cache)) for n, cache in zip(heights, layout.caches, strict=True)), 0
    for name, placed, cache in zip(names, layout.caches, opened.blob.caches, strict=False):
        first, begin = next((stream for stream in placed if stream), None), len(rows)
        if first is None:
            continue
        for i, k in enumerate(first.k):
            rows.append(LayerRow(name, i, Measured.of(k), Measured.of(first.v[i]) if first.v else None))
        for stream in cache:
            held = [(grid, held_by(layout, stream.cells, grid.seq)) for grid in maps] if stream.layers else []
            for i, layer in enumerate(stream.layers):
                row = rows[begin + i]
                for which, (values, into) in enumerate(((layer.k, row.first), (layer.v, row.second))):
                    if values is None or into is None:
                        continue
                    norms = _norms(values, into.type)
                    into.norm.add(norms)
                    for grid, index in held:
                        grid.add(which, begin + i, stream.pos[index], norms[index])
                done += 1
                if on_progress:
                    on_progress(done, total)
    recurrent = opened.blob.recurrent
    if recurrent and layout.recurrent:
        pairs = zip(layout.recurrent.r, layout.recurrent.s, recurrent.r, recurrent.s, strict=True)
        for i, (r, s, r_values, s_values) in enumerate(pairs):
            first_tensor, second_tensor = Measured.of(r), Measured.of(s)
            first_tensor.norm.add(_norms(r_values, first_tensor.type))
            second_tensor.norm.add(_norms(s_values, second_tensor.type))
            rows.append(LayerRow("recurrent", i, first_tensor, second_tensor))
    return rows, maps


def held_by(layout: Layout, cells: Cells, seq: int) -> npt.NDArray[np.intp]:
    """Indices of a sequence's cells. In a sequence's state all are its own, whatever number it had when it was saved."""
    return cells.held_by(seq) if layout.whole else np.arange(len(cells))


_PIECE = 1 << 18
"""Values that are made float32 at a time: new memory for a whole layer costs more than all the rest."""


def _norms(values: npt.NDArray[Any], kind: str) -> Norms:
    """L2 norm of each row. In pieces of rows, or, of a transposed V, of columns: as they lie in memory."""
    n_rows, n_columns = values.shape
    squares = np.zeros(n_rows)  # float64: the square of a large float32 is none
    number = next(number for number, known in GGML_TYPES.items() if known.name == kind)
    with np.errstate(all="ignore"):
        if values.strides[0] < values.strides[1]:
            step = max(1, _PIECE // max(1, n_rows))
            for at in range(0, n_columns, step):
                piece = float32(values[:, at : at + step], number)
                squares += np.einsum("ij,ij->i", piece, piece, dtype=np.float64)
        else:
            step = max(1, _PIECE // max(1, n_columns))
            for at in range(0, n_rows, step):
                piece = float32(values[at : at + step], number)
                squares[at : at + step] = np.einsum("ij,ij->i", piece, piece, dtype=np.float64)
        found: Norms = np.sqrt(squares)
    return found


def _empty_grids(layout: Layout, n_rows: int) -> list[Grid]:
    begins = np.full(MAX_SEQ, 2**31 - 1)
    for stream in (stream for cache in layout.caches for stream in cache if stream):
        owners = stream.cells.owners if layout.whole else np.full(len(stream.cells), layout.seq_id)
        np.minimum.at(begins, owners, stream.cells.pos[stream.cells.owner_cells])
    sizes = {seq: end - int(begins[seq]) for seq, end in layout.sequences.items() if end > begins[seq]}
    longest = sorted(sizes, key=lambda seq: (-sizes[seq], seq))[:MAX_MAPS]
    return [Grid(seq, int(begins[seq]), layout.sequences[seq], n_rows) for seq in sorted(longest)]


# ── as data ──────────────────────────────────────────────────────────────────────────────────────────


def describe(opened: Opened, rows: Iterable[LayerRow] | None = None) -> dict[str, Any]:
    """Everything about a file but its numbers, as plain data for JSON."""
    record = opened.record
    layout = record.layout
    streams = [stream for cache in layout.caches for stream in cache if stream]
    k_bytes, v_bytes = (
        sum(len(stream.cells) * tensor.row_bytes for stream in streams for tensor in getattr(stream, kind))
        for kind in "kv"
    )
    r_bytes = 0
    if layout.recurrent:
        tensors = (*layout.recurrent.r, *layout.recurrent.s)
        r_bytes = len(layout.recurrent.cells) * sum(tensor.row_bytes for tensor in tensors)
    sequences = {}
    for seq, end in layout.sequences.items():
        cells = [sum(len(held_by(layout, stream.cells, seq)) for stream in cache if stream) for cache in layout.caches]
        row = record.logits.get(seq)
        sequences[str(seq)] = {
            "next_position": end,
            "cells": cells,
            "tokens": opened.tokens.get(seq, 0),
            "logits": opened.logits.get(seq, 0),
            "most_likely_next": None if row is None else int(row.argmax()),
        }
    return {
        "file": opened.path,
        "format": opened.format,
        "kind": "context" if layout.whole else "delta" if record.begin else "sequence",
        "begin": record.begin,
        "identity": None if record.identity is UNKNOWN else record.identity.to_meta(),
        "window": record.window,
        "architecture": layout.arch,
        "types": {
            kind: sorted({GGML_TYPES[tensor.type].name for stream in streams for tensor in getattr(stream, kind)})
            for kind in "kv"
        },
        "n_stream": layout.n_stream,
        "v_transposed": layout.v_transposed if layout.parts.has_v else None,
        "sequences": sequences,
        "bytes": {
            "file": opened.n_bytes,
            "state": layout.n_bytes,
            "keys": k_bytes,
            "values": v_bytes,
            "recurrent": r_bytes,
            "bookkeeping": layout.n_bytes - k_bytes - v_bytes - r_bytes,
            "tokens": 4 * sum(opened.tokens.values()),
            "logits": 4 * sum(opened.logits.values()),
        },
        "layers": None if rows is None else [row.to_dict() for row in rows],
    }


# ── as a picture ─────────────────────────────────────────────────────────────────────────────────────


def draw(rows: list[LayerRow], grids: list[Grid], path: str, title: str) -> None:
    """Draw heat maps of key and value norms, by layer and position, a pair for each grid; write a PNG or SVG atomically.

    Raises
    ------
    ImportError
        `matplotlib` is not installed.
    InvalidArgumentError
        Another kind of picture; or a recurrent state, which has no rows by position.
    DiskFullError, OSError
    """
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".png", ".svg"):
        raise InvalidArgumentError(f"a picture should end in .png or .svg: {path}")
    if not grids:
        raise InvalidArgumentError("a recurrent state has no keys and values by token position that could be drawn")
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "swarmkv"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a file's name, in a script that the font has not
        drawn, image = figure(rows, grids, title), BytesIO()
        drawn.savefig(image, format=kind[1:], dpi=150, metadata={"Date": None} if kind == ".svg" else None)
    data = image.getvalue()
    with atomic_file(path, len(data)) as file:
        write_all(file, data)


def figure(rows: list[LayerRow], grids: list[Grid], title: str) -> Figure:
    """What `draw` writes."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    rows = [row for row in rows if row.memory != "recurrent"]
    kinds = ["keys", "values"] if any(row.second for row in rows) else ["keys"]
    height = min(max(2.6, 1.3 + 0.09 * len(rows)), 6.0)
    made = Figure(figsize=(6.4 * len(kinds), 0.9 + height * len(grids)), layout="constrained")
    made.suptitle(title, fontsize=12, parse_math=False)
    axes = made.subplots(len(grids), len(kinds), squeeze=False)
    for which, kind in enumerate(kinds):
        scale, how = _scale([grid.map(which) for grid in grids])
        for i, grid in enumerate(grids):
            ax = axes[i, which]
            numbers = grid.map(which)
            extent = (grid.begin - 0.5, grid.begin + grid.n_columns * grid.width - 0.5, len(rows) - 0.5, -0.5)
            image = ax.imshow(
                np.ma.masked_invalid(numbers),
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
                norm=scale,
                extent=extent,
            )
            ax.set_facecolor("0.85")
            ax.set_xlim(grid.begin - 0.5, grid.end - 0.5)
            of = f" of sequence {grid.seq}" if len(grids) > 1 else ""
            ax.set_title(f"{kind.capitalize()}{of}: norm of each token's row", fontsize=11)
            mean = f", mean of {grid.width} a column" if grid.width > 1 else ""
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 5, 10)))
            ax.xaxis.set_major_formatter("{x:,.0f}")
            missing = "; grey: not held" if np.isnan(numbers).any() else ""
            ax.set_xlabel(f"position (tokens{mean}){missing}")
            _layer_axis(ax, rows)
            ticks, form = (LogLocator(subs=(1, 2, 5)), "%g") if isinstance(scale, LogNorm) else (None, None)
            bar = made.colorbar(image, ax=ax, extend="both", pad=0.02, ticks=ticks, format=form)
            bar.minorticks_off()
            bar.set_label(f"L2 norm of the {kind[:-1]} row{how}")
    return made


def _scale(maps: list[npt.NDArray[np.float64]]) -> tuple[Any, str]:
    """Colours for 98 % of the numbers, so that a few far off do not hide the others; by decades if those span many."""
    from matplotlib.colors import LogNorm, Normalize

    numbers = np.concatenate([found[np.isfinite(found)] for found in maps])
    low, high = np.percentile(numbers, [1, 99]) if len(numbers) else (0.0, 1.0)
    if high <= low:
        low, high = low - 0.5, low + 0.5
    if low > 0 and high / low > 10:
        return LogNorm(low, high), ", log scale"
    return Normalize(low, high), ""


def _layer_axis(ax: Axes, rows: list[LayerRow]) -> None:
    """Layers by their number, at most some twenty of them; a line between the full and the windowed ones."""
    step = -(-len(rows) // 16)
    shown = [at for at, row in enumerate(rows) if row.layer % step == 0]
    ax.set_yticks(shown, [f"{'w' if rows[at].memory == 'windowed' else ''}{rows[at].layer}" for at in shown])
    ax.tick_params(axis="y", labelsize=8)
    border = next((at for at, row in enumerate(rows) if row.memory == "windowed"), 0)
    if border:
        ax.axhline(border - 0.5, color="white", linewidth=1.5)
    windowed = any(row.memory == "windowed" for row in rows)
    ax.set_ylabel("layer (w: sliding window)" if windowed else "layer")
