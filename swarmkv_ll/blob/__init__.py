"""A state blob as data: look inside it as numpy arrays, cut it, convert it, append to it. Needs no engine.

    >>> blob = parse(snapshot.array)
    >>> blob.pos, blob.layers[0].k
    >>> edit = slice(blob, 200)                     # nothing is copied yet
    >>> edit.write(arena.lease(edit.n_bytes).array)

`docs/blob.md` tells how each kind of memory writes its state.
"""

from .layout import GGML_TYPES, MAGIC, Cells, Layer, Layout, Parts, StateBlob, Stream, parse, read_layout
from .recast import Edit, append, convert, delta, extract, slice

__all__ = [
    "GGML_TYPES",
    "MAGIC",
    "Cells",
    "Edit",
    "Layer",
    "Layout",
    "Parts",
    "StateBlob",
    "Stream",
    "append",
    "convert",
    "delta",
    "extract",
    "parse",
    "read_layout",
    "slice",
]
